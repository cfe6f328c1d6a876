"""gpt-oss (OpenAI 2025): experts with a gate and biases of their own, and attention that may look at nothing."""

from engine.models.config import ModelConfig
from engine.models.style import ExpertStyle, Style


def style(config: ModelConfig) -> Style:
    """A sink of each head; experts in every layer; a window in every other."""
    experts = ExpertStyle(router="mlp.router", renormalises=True, activation="clamped", is_turned=True)
    bias = config.attention_bias
    return Style(windows=config.windows, qkv_bias=bias, output_bias=bias, experts=experts, sinks=True)
