"""Who may call, from where, and how much: certificates, keys, scopes, quotas, limits."""
