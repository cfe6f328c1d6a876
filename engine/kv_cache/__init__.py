"""The KV cache: block ownership by id (pool, prefix index, block tables, tiers), and storage of the blocks' bytes."""
