"""Logits to tokens for a whole step. Knows rows and parameters; nothing of who asked."""
