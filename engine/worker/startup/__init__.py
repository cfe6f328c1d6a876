"""Decisions, measurements and checks while an engine is built: formats, memory, rates, a trial of the first tokens."""
