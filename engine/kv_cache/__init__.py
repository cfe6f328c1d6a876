"""Who owns which cache block, in ids only: pool, prefix index, block tables, tiers; and where the bytes of blocks
lie."""
