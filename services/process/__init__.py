"""What every process of the ring needs of its operating system: life signs, sockets, private files, priorities."""
