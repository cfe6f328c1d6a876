"""The host's cores, compute threads and memory allocator."""
