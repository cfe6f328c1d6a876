"""Draft proposers (chains or trees of tokens) and draft lengths. Drafts are verified and change no output token."""
