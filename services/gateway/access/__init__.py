"""Who a caller is, what its call carries, and how much it may ask for: certificates, keys, scopes, quotas, limits."""
