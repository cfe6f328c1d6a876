"""The adapters that requests may name: which there are, where they are, and loading them into engines."""
