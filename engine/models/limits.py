"""Derives `Limits` from the model and the settings; every stage of a service derives the same value.

Depends on the standard library only, as every stage needs it.
"""

from collections.abc import Iterator

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.plugins.entry_points import NO_PLUGINS, Plugins
from sluice_server.engine.request import Limits, Pooling

TABLES_SHARE = 0.25  # share of a machine's memory for the rotary tables of all positions


def check_tables(model: ModelConfig, limits: Limits, memory_bytes: int) -> None:
    """Raises ServiceError INVALID_SETTING if rotary tables for all positions need too much of the machine's memory."""
    num_tables = 1 if model.local_rope is None else 2
    size, most = 4 * num_tables * limits.context_length * model.head_dim, int(memory_bytes * TABLES_SHARE)
    if size > most:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_SETTING",
            f"--max-model-len: {limits.context_length} positions (0 takes the checkpoint's max_position_embeddings) "
            f"need rotary tables of {size >> 20} MiB; this machine allows {most >> 20}: set it lower",
        )


def _poolings(model: ModelConfig) -> Iterator[Pooling]:
    """Yields how the model's hidden states can be pooled."""
    yield from (Pooling.LAST, Pooling.MEAN)
    if model.encoder is not None:
        yield Pooling.FIRST
    if model.labels is not None:
        yield Pooling.CLASSES


def _embeds_width(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the width of prompt embeddings; 0 if they are off. Raises ServiceError for a model without."""
    if not config.enable_prompt_embeds:
        return 0
    if not model.generates:
        raise _no_embeds("this model generates nothing")
    if config.num_ranks > 1:
        raise _no_embeds("a model over several ranks takes none")
    return model.hidden_size


def _max_adapters(config: EngineConfig, model: ModelConfig) -> int:
    """Returns `Limits.max_adapters`. Raises ServiceError for a model that takes none."""
    if config.max_adapters and model.encoder is not None:
        text = f"--max-adapters: {model.architecture} is an encoder, and encoders take no adapters: leave it out"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="max_adapters")
    return config.max_adapters


def _no_embeds(message: str) -> ServiceError:
    text = f"--enable-prompt-embeds: {message}: leave it out"
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="enable_prompt_embeds")


def check_embeds_scale(model: ModelConfig, scale: float) -> None:
    """Raises ServiceError INVALID_SETTING for a model that multiplies its embeddings by a `scale`: libraries differ in
    whether given ones are multiplied, too."""
    if scale != 1.0:
        raise _no_embeds(f"{model.architecture} multiplies its embeddings by {scale:g}")


def limits_of(config: EngineConfig, model: ModelConfig, max_prompt_bytes: int, plugins: Plugins = NO_PLUGINS) -> Limits:
    """Returns the limits; requests may ask for these `plugins`.

    Raises ServiceError INVALID_SETTING if --max-model-len exceeds the model's context.
    """
    if config.max_model_len > model.context_length:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_SETTING",
            f"--max-model-len: {config.max_model_len} is above the model's context of {model.context_length} tokens",
        )
    return Limits(
        max_adapters=_max_adapters(config, model),
        embeds_width=_embeds_width(config, model),
        context_length=config.max_model_len or model.context_length,
        vocab_size=model.vocab_size,
        generates=model.generates,
        poolings=tuple(_poolings(model)),
        max_prompt_bytes=max_prompt_bytes,
        max_draft_tokens=0 if config.speculation == "none" else config.max_draft_tokens,
        logits_processors=tuple(plugins.processors),
        sampling_strategies=tuple(plugins.strategies),
    )
