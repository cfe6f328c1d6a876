"""What every process of the ring needs from its operating system: heartbeats, sockets, private files, time slices."""
