"""Whether the ring is whole, and what is sent again after it was not. Pure but for the requests."""
