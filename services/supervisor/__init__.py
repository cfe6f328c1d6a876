"""Runs the ring's processes on one host: starts, watches, restarts and stops them, and cleans up after them."""
