"""Replays a request trace in simulated time against ways to choose an engine; see `benchmarks.routing.__main__`."""
