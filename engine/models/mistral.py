"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """No biases; the window of the checkpoint, where it has one."""
    return ArchitectureTraits(windows=config.windows)
