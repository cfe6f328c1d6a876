"""The supported architectures: a table from the name in config.json to a function that returns the traits."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models import architectures
from sluice_server.engine.models.bare import HEADLESS
from sluice_server.engine.models.config import ACTIVATIONS, ModelConfig, named_architecture, read_config
from sluice_server.engine.models.encoders.families import ENCODERS
from sluice_server.engine.models.encoders.reading import read_encoder
from sluice_server.engine.models.fields import Fields, read_json, shown
from sluice_server.engine.models.not_built import check_built
from sluice_server.engine.models.text_model import WITH_TEXT
from sluice_server.engine.models.traits import ArchitectureTraits

ARCHITECTURES: dict[str, Callable[[ModelConfig], ArchitectureTraits]] = {
    "GemmaForCausalLM": architectures.gemma,
    "Gemma2ForCausalLM": architectures.gemma2,
    "Gemma3ForCausalLM": architectures.gemma3,
    "GptOssForCausalLM": architectures.gpt_oss,
    "GraniteForCausalLM": architectures.granite,
    "LlamaForCausalLM": architectures.llama,
    "MistralForCausalLM": architectures.mistral,
    "MixtralForCausalLM": architectures.mixtral,
    "Olmo2ForCausalLM": architectures.olmo2,
    "Phi3ForCausalLM": architectures.phi3,
    "Qwen2ForCausalLM": architectures.qwen2,
    "Qwen2MoeForCausalLM": architectures.qwen2_moe,
    "Qwen3ForCausalLM": architectures.qwen3,
    "Qwen3MoeForCausalLM": architectures.qwen3_moe,
    "SmolLM3ForCausalLM": architectures.smollm3,
}


Traits: TypeAlias = Callable[[ModelConfig], ArchitectureTraits]


def traits_of(config: ModelConfig, own: Traits | None = None) -> ArchitectureTraits:
    """Returns the traits of a checkpoint's architecture; `own`: the function of a plugin.

    Raises ServiceError UNIMPLEMENTED listing what is supported.
    """
    traits = (own or _supported(config.architecture))(config)
    known_here = ACTIVATIONS.values() if traits.experts is None else ("silu",)
    if config.activation not in known_here:
        known = ", ".join(name for name, one in ACTIVATIONS.items() if one in known_here)
        text = f"hidden_act {shown(config.activation)} is not supported; supported are {known}"
        raise unsupported("hidden_act", text)
    if (traits.experts is None) is not (config.experts is None):
        named = "no" if config.experts is None else config.experts.num
        raise unsupported("experts", f"config.json names {named} experts: {config.architecture!r} is not served so")
    if config.rope.partial != 1.0 and not traits.is_partly_rotated:
        text = f"partial_rotary_factor is {config.rope.partial}; {config.architecture} is supported with 1.0"
        raise unsupported("partial_rotary_factor", text)
    return traits


def _supported(architecture: str) -> Traits:
    make = ARCHITECTURES.get(architecture)
    if make is None:
        known = ", ".join(sorted([*ARCHITECTURES, *WITH_TEXT, *ENCODERS]))
        raise unsupported("architecture", f"architecture {shown(architecture)} is not supported; supported are {known}")
    return make


def read_served(directory: Path, plugged: Collection[str] = ()) -> ModelConfig:
    """Reads the config of a checkpoint with a supported architecture.

    Those of plugins (`plugged`) are checked where these are loaded. Raises ServiceError like `read_config`,
    `traits_of`.
    """
    path = directory / "config.json"
    named = named_architecture(Fields(path, read_json(path)))
    if named in ENCODERS and named not in plugged:
        return read_encoder(directory, named)
    if named not in plugged and named not in WITH_TEXT:
        check_built(named)
        _supported(HEADLESS.get(named, named))  # before its fields are read: they may be of another kind of model
    config = read_config(directory, plugged)
    if config.architecture not in plugged:
        traits_of(config)
    return config
