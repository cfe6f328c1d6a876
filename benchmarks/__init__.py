"""The benchmarks and their results."""
