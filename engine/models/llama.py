"""Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024): the plain form that the shared layers implement."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Full attention in every layer; biases only where the checkpoint says so."""
    return ArchitectureTraits(
        windows=(None,) * config.num_layers,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
