"""Who owns which cache block: pool, prefix index, block tables. Ids only: no tensor, no request text, no scheduling."""
