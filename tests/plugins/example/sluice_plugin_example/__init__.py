"""An example of plugins: a model and two logits processors."""
