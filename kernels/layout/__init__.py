"""Where things lie: a step's tokens in the paged cache, the rows of a ragged batch, trees, shared prefixes."""
