"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Head norms; biases only where the checkpoint says so."""
    return ArchitectureTraits(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )
