"""The models behind a gateway: one lane each, and the names by which requests choose them."""
