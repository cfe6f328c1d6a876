"""Generated stubs of the contract `sluice.v1`. Written by tools/generate_stubs.py, never by hand."""
