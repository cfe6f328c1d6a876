"""Runs the ring's processes on one host: starts, watches, restarts and stops them, and leaves nothing behind."""
