"""Device sources to libraries, and kernel files of a user's to functions: compilers, cache, drivers, resources.

Ours and a user's go one way: a compiler (`compiler`), a file in the cache that is checked before use (`entries`), and
the system or a driver that loads it (`entries.shared_library`, `launch.load`). docs/own-kernels.md says what is public.
"""
