"""Finds a model's directory, names its contents, and reads its tokenizer for grammars."""
