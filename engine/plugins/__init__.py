"""Models and logits processors of other packages."""
