"""Identity and limits of callers: certificates, keys, scopes, quotas, admission, and the metadata of a call."""
