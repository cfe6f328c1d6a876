"""The machine that computes: its cores, compute threads and memory allocator."""
