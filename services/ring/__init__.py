"""The transport between stages: peer tables, ZeroMQ sockets, and the event loop that every stage runs in."""
