"""Turns prompts into token ids: chat templates, encoding, constraints, and the bytes of each token."""
