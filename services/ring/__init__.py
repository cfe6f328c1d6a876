"""How messages travel: peer tables, ZeroMQ sockets and the one loop that every stage runs in."""
