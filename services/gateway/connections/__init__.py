"""Connections of clients: listening, accepting, their limits, and cutting those that exceed them. Works below
requests."""
