"""Encoders of the BERT family: attention to the whole input in both directions, no cache, no generation."""
