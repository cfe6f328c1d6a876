"""Starts a ring's processes on the machines of a cluster that something else manages, and keeps them alive."""
