"""Health of the ring, and which requests are sent again after a loss. Does no I/O; messages leave through callbacks."""
