"""Gemma (Gemma Team 2024, arXiv 2403.08295): Llama with norms around one, scaled embeddings and a GELU gate."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """What all Gemmas have; biases only where the checkpoint says so."""
    return ArchitectureTraits(
        windows=config.windows,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm_offset=1.0,
        scales_embeddings=True,
    )
