"""Architectures, weight loading and layers. Knows nothing of batching policy, requests or text."""
