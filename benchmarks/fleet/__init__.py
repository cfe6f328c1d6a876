"""Simulates many cells of engines in simulated time with the classes that serve; see `benchmarks.fleet.__main__`."""
