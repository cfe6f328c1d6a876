"""An attention that halves the scores: softer than the model's own."""

from torch import Tensor

from sluice_server.engine.plugins.interface import API, AttentionPlugin
from sluice_server.kernels import ops
from sluice_server.kernels.layout.metadata import AttentionMetadata


def halved(  # noqa: PLR0913 # all that attention depends on
    q: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    is_fixed: bool = False,
) -> Tensor:
    """Computes attention with half the factor of scores."""
    return ops.paged_attention(q, cache, meta, scale / 2, window, cap, sinks, is_fixed=is_fixed)


HALVED = AttentionPlugin(API, halved)
