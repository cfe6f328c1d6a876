"""The directory of a model: where it is found, what names its contents, and its tokenizer as grammars follow it."""
