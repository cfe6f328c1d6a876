"""The command line: serve, generate, bench, demo."""
