"""Number formats of weights, and the linear layers that multiply each of them."""
