"""Number formats of weights, and the linear layers that multiply weights of each format."""
