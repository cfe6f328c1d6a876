"""The state of each slot: sampling parameters, tokens, and adjustments of its logits."""
