"""Generated stubs of the contract `inference`. Written by tools/generate_stubs.py, never by hand."""
