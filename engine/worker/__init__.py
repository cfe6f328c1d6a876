"""Computes step plans: plan to tensors, forward pass, sampling. Keeps a permanent row of state for each slot."""
