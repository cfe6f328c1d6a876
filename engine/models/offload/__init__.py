"""Weights of layers that are not kept in the memory that computes: a store, and what brings them there in time."""
