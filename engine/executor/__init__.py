"""Runs plans: the interface of a runner, and the retry of a plan whose computation fails."""
