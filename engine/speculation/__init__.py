"""Who drafts tokens, and how many are worth it. Nothing here can change a token: what is drafted is verified."""
