"""Traces, metrics and logs of the services. The engine does not import it: it records plain numbers."""
