"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from engine.models.config import ModelConfig
from engine.models.style import Style


def style(config: ModelConfig) -> Style:
    """No biases; the window of the checkpoint, where it has one."""
    return Style(windows=config.windows)
