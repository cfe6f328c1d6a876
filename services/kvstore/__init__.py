"""The store of cache blocks of one host: a process that keeps what its engines offer, in memory and on disk."""
