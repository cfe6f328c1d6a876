"""Makes the configuration files of a Hugging Face checkpoint from the metadata of a GGUF file."""
