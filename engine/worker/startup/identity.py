"""Builds the identity that an engine's cache blocks are named by: loaded contents, formats, kernels."""

import dataclasses

from sluice_server.engine.config import DEFAULTS, EngineConfig
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.worker.startup.formats import Formats, name_of
from sluice_server.kernels.contract import computes_as


@dataclasses.dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the checkpoints of the model and of the drafter; empty if it has none."""

    weights: bytes = b""
    draft: bytes = b""


def identity_of(
    config: EngineConfig, formats: Formats, model: Model, digests: Digests, plugin: str = ""
) -> CacheIdentity:
    """Returns everything that the bits of this engine's cache blocks depend on; `plugin` names what computes the
    model."""
    order = "fixed" if model.is_fixed else "free"  # order of summation
    shards = shape_of(config).sum_shards
    order = f"{order} order of {shards} sums in the" if shards > 1 else order
    return CacheIdentity(
        weights=digests.weights,
        draft=f"{config.speculation} ".encode() + digests.draft if config.draft_model else b"",
        weights_format=_weights_format(formats, model),
        dtype=name_of(formats.dtype),
        cache_dtype=name_of(formats.cache),
        kernels=f"{computes_as(model.device)}, {model.kernel}, {order} order"
        + (f", {shards} shards" if shards > 1 else "")
        + (f" in {config.sum_dtype}" if config.sum_dtype != DEFAULTS.sum_dtype else ""),
        plugin=plugin,
    )


def rank_layout(config: EngineConfig, formats: Formats, model: Model) -> str:
    """Returns what must be equal on all ranks of a group, for people: formats, and the shape of a layer's blocks."""
    size = f"{config.block_size} tokens of {model.token_bytes(formats.cache) // len(model.layers)} bytes a layer"
    parts = (name_of(formats.dtype), _format(formats, model), f"{name_of(formats.cache)} cache", size)
    return ", ".join(filter(None, parts))


def _weights_format(formats: Formats, model: Model) -> str:
    return " ".join(filter(None, (_format(formats, model), model.observed)))


def _format(formats: Formats, model: Model) -> str:
    stored = "" if model.config.stored is None else f"stored {model.config.stored.method}"
    return " ".join(filter(None, (stored, formats.weights)))
