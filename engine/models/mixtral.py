"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from engine.models.config import ModelConfig
from engine.models.style import ExpertStyle, Style


def style(config: ModelConfig) -> Style:
    """No biases; the window of the checkpoint, where it has one; shares add up to 1."""
    at = "block_sparse_moe"
    experts = ExpertStyle(f"{at}.gate", f"{at}.experts", gate="w1", up="w3", down="w2", renormalises=True)
    return Style(windows=config.windows, experts=experts)
