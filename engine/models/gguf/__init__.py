"""Reads GGUF files: their header, their tensors, and the weights of a model by their Hugging Face names."""
