"""Attacks on a running service, each by a process of its own, and what a well-behaved neighbour sees of them."""
