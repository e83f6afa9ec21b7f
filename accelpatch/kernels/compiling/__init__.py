"""Device sources to libraries: compilers, cache, resources, occupancy."""
