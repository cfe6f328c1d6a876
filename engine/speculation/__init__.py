"""Draft proposers (chains or trees of tokens) and the choice of draft lengths. Drafts are verified: no output token
changes."""
