"""Builds the identity that an engine's cache blocks are named by: loaded contents, formats, kernels."""

import dataclasses

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.startup.formats import Formats, name_of
from sluice_server.kernels.contract import computes_as


@dataclasses.dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the checkpoints of the model and of the drafter; empty if it has none."""

    weights: bytes = b""
    draft: bytes = b""


def identity_of(config: EngineConfig, formats: Formats, model: Model, digests: Digests) -> CacheIdentity:
    """Returns everything that the bits of this engine's cache blocks depend on."""
    stored = model.config.stored
    order = "fixed" if model.is_fixed else "free"  # order of summation
    return CacheIdentity(
        weights=digests.weights,
        draft=f"{config.speculation} ".encode() + digests.draft if config.draft_model else b"",
        weights_format=" ".join(filter(None, ("" if stored is None else f"stored {stored.method}", formats.weights))),
        dtype=name_of(formats.dtype),
        cache_dtype=name_of(formats.cache),
        kernels=f"{computes_as(model.device)}, {model.kernel}, {order} order",
    )
