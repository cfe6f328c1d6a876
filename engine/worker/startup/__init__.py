"""What is decided, measured and checked once, while an engine is built: formats, memory, rates, a first token."""
