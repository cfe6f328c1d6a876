"""Media of requests: encoded images in, pixels as a model takes them out."""
