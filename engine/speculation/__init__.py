"""Who drafts tokens, in chains or trees, and how many are worth it. What is drafted is verified: no token changes."""
