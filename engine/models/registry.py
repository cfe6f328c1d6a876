"""Which architectures are supported: one table from the name in config.json to its style."""

from collections.abc import Callable
from pathlib import Path

from engine.errors import unsupported
from engine.models import gemma, gemma2, gemma3, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from engine.models.config import ACTIVATIONS, ModelConfig, read_config
from engine.models.fields import shown
from engine.models.style import Style

ARCHITECTURES: dict[str, Callable[[ModelConfig], Style]] = {
    "GemmaForCausalLM": gemma.style,
    "Gemma2ForCausalLM": gemma2.style,
    "Gemma3ForCausalLM": gemma3.style,
    "GptOssForCausalLM": gpt_oss.style,
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
            "architecture", f"architecture {shown(config.architecture)} is not supported; supported are {known}"
        )
    style = make(config)
    known_here = ACTIVATIONS.values() if style.experts is None else ("silu",)
    if config.activation not in known_here:
        known = ", ".join(name for name, one in ACTIVATIONS.items() if one in known_here)
        text = f"hidden_act {shown(config.activation)} is not supported; supported are {known}"
        raise unsupported("hidden_act", text)
    if (style.experts is None) is not (config.experts is None):
        named = "no" if config.experts is None else config.experts.num
        raise unsupported("experts", f"config.json names {named} experts: {config.architecture!r} is not served so")
    return style


def read_served(directory: Path) -> ModelConfig:
    """The shape of a checkpoint whose architecture is supported. Raises ServiceError as `read_config`, `style_of`."""
    config = read_config(directory)
    style_of(config)
    return config
