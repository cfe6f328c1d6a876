"""The embedded demo model: a small Llama that writes Python, its draft, and the script that made both.

In: the standard library's own source. Out: `target/` and `draft/`, two Hugging Face checkpoints sharing one tokenizer.
Nothing of the server is known here; the server knows only the two folders.
"""
