"""gpt-oss (OpenAI 2025): experts with a gate and biases of their own, and attention that may look at nothing."""

from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits, ExpertTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """A sink of each head; experts in every layer; a window in every other."""
    experts = ExpertTraits(router="mlp.router", renormalises=True, activation="clamped", is_turned=True)
    bias = config.attention_bias
    return ArchitectureTraits(windows=config.windows, qkv_bias=bias, output_bias=bias, experts=experts, sinks=True)
