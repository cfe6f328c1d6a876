"""Prompts to token ids: encoding, chat templates, and the bytes of each token."""
