"""The native CPU library: C++ sources and their bindings."""
