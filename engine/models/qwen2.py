"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on query, key and value."""

from engine.models.config import ModelConfig
from engine.models.style import Style


def style(config: ModelConfig) -> Style:
    """Biases on the three input projections; a window in the upper layers where it is switched on."""
    return Style(windows=config.windows, qkv_bias=True)
