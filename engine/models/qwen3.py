"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head."""

from engine.models.config import ModelConfig
from engine.models.style import Style


def style(config: ModelConfig) -> Style:
    """Head norms; biases only where the checkpoint says so."""
    return Style(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )
