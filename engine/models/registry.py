"""Which architectures are supported: one table from the name in config.json to its style."""

from collections.abc import Callable

from engine.errors import unsupported
from engine.models import gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3
from engine.models.config import ACTIVATIONS, ModelConfig
from engine.models.style import Style

ARCHITECTURES: dict[str, Callable[[ModelConfig], Style]] = {
    "GemmaForCausalLM": gemma.style,
    "Gemma2ForCausalLM": gemma2.style,
    "Gemma3ForCausalLM": gemma3.style,
    "LlamaForCausalLM": llama.style,
    "MistralForCausalLM": mistral.style,
    "Qwen2ForCausalLM": qwen2.style,
    "Qwen3ForCausalLM": qwen3.style,
}


def style_of(config: ModelConfig) -> Style:
    """The style of a checkpoint's architecture. Raises ServiceError UNIMPLEMENTED listing what is supported."""
    make = ARCHITECTURES.get(config.architecture)
    if make is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise unsupported(
            "architecture", f"architecture {config.architecture!r} is not supported; supported are {known}"
        )
    if config.activation not in ACTIVATIONS.values():
        text = f"hidden_act {config.activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        raise unsupported("hidden_act", text)
    return make(config)
