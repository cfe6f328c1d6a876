"""Traces, metrics and logs. Only services see it; the engine records plain numbers."""
