"""Carries plans out: what the engine asks of a runner, and what becomes of a plan whose computation fails."""
