"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits, ExpertTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """No biases; the window of the checkpoint, where it has one; shares add up to 1."""
    at = "block_sparse_moe"
    experts = ExpertTraits(f"{at}.gate", f"{at}.experts", gate="w1", up="w3", down="w2", renormalises=True)
    return ArchitectureTraits(windows=config.windows, experts=experts)
