"""Samples the tokens of a whole step from its logits. Depends on rows and sampling parameters, not on requests."""
