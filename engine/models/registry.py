"""Which architectures are supported: one table from the name in config.json to its style."""

from collections.abc import Callable

from engine.errors import unsupported
from engine.models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from engine.models.config import ModelConfig
from engine.models.style import Style

ARCHITECTURES: dict[str, Callable[[ModelConfig], Style]] = {
    "LlamaForCausalLM": llama.style,
    "MistralForCausalLM": mistral.style,
    "MixtralForCausalLM": mixtral.style,
    "Qwen2ForCausalLM": qwen2.style,
    "Qwen3ForCausalLM": qwen3.style,
    "Qwen3MoeForCausalLM": qwen3_moe.style,
}


def style_of(config: ModelConfig) -> Style:
    """The style of a checkpoint's architecture. Raises ServiceError UNIMPLEMENTED listing what is supported."""
    make = ARCHITECTURES.get(config.architecture)
    if make is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise unsupported(
            "architecture", f"architecture {config.architecture!r} is not supported; supported are {known}"
        )
    style = make(config)
    if (style.experts is None) is not (config.experts is None):
        named = "no" if config.experts is None else config.experts.num
        raise unsupported("experts", f"config.json names {named} experts: {config.architecture!r} is not served so")
    return style
