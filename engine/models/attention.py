"""The type of what computes attention over the paged cache: the kernels' operation, or that of another package."""

from typing import Protocol

from torch import Tensor

from sluice_server.kernels.layout.metadata import AttentionMetadata


class PagedAttention(Protocol):
    """Computes attention as `kernels.ops.paged_attention` does, with its arguments and its result."""

    def __call__(  # noqa: PLR0913 # all that attention depends on
        self,
        q: Tensor,
        cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        *,
        is_fixed: bool = False,
    ) -> Tensor: ...
