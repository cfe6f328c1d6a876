"""Computes plans: plan to tensors, forward, sample. Keeps a permanent row for each slot; knows no policy."""
