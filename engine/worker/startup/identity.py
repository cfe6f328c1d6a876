"""What names the cache blocks of an engine: the contents that it loaded, its formats, and what computes."""

import dataclasses

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.startup.formats import Formats, name_of
from sluice_server.kernels.contract import computes_as


@dataclasses.dataclass(frozen=True, slots=True)
class Digests:
    """What names the contents of the checkpoints, that of the model and that of what drafts; empty without a name."""

    weights: bytes = b""
    draft: bytes = b""


def identity_of(config: EngineConfig, formats: Formats, model: Model, digests: Digests) -> CacheIdentity:
    """What the bits of this engine's cache blocks depend on."""
    stored = model.config.stored
    order = "fixed" if model.is_fixed else "free"  # of sums
    return CacheIdentity(
        weights=digests.weights,
        draft=f"{config.speculation} ".encode() + digests.draft if config.draft_model else b"",
        weights_format=formats.weights if stored is None else f"stored {stored.method}",
        dtype=name_of(formats.dtype),
        cache_dtype=name_of(formats.cache),
        kernels=f"{computes_as(model.device)}, {model.kernel}, {order} order",
    )
