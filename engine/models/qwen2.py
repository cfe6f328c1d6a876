"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on query, key and value."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Biases on the three input projections; a window in the upper layers where it is switched on."""
    return ArchitectureTraits(windows=config.windows, qkv_bias=True)
