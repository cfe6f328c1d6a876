"""Gemma (Gemma Team 2024, arXiv 2403.08295): Llama with norms around one, scaled embeddings and a GELU gate."""

from engine.models.config import ModelConfig
from engine.models.style import Style


def style(config: ModelConfig) -> Style:
    """What all Gemmas have; biases only where the checkpoint says so."""
    return Style(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm_offset=1.0,
        scales_embeddings=True,
    )
