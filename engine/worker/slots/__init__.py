"""The state that a runner keeps for each slot: sampling parameters, tokens, and what changes its logits."""
