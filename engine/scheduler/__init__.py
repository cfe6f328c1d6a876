"""Decides which tokens run next. Pure Python: the clock is passed in, no tensor is seen."""
