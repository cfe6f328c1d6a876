"""Which architectures are supported: one table from the name in config.json to its style."""

from collections.abc import Callable

from engine.errors import unsupported
from engine.models import llama, mistral, qwen2, qwen3
from engine.models.config import ModelConfig
from engine.models.style import Style

ARCHITECTURES: dict[str, Callable[[ModelConfig], Style]] = {
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
    return make(config)
