"""The embedded demo model: a small Llama that writes Python, its draft, its EAGLE-3 head, and the scripts that made
them.

In: the standard library's own source. Out: `target/`, `draft/` and `head/`, Hugging Face checkpoints with one
    tokenizer. Independent of the server, which only reads the folders.
"""
