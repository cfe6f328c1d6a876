"""Profiles of a running process: call stacks, Python memory, and what an engine adds; recorded on request, bounded."""
