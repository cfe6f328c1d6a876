"""Attention of a model's layers by what was chosen for each kind of step."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from sluice_server.kernels.backends.interface import OURS, AttentionBackend, StepKind, kind_of
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenAttention:
    """Computes attention as `kernels.ops.paged_attention` does on a GPU, with its arguments.

    Rows of trees, rows that share prefixes and tokens that see later ones are our kernels' in any case, and so are
    recorded steps whose library cannot be recorded.

    Attributes:
        of_kind: what computes a kind of step; our kernels where nothing is named.
    """

    of_kind: Mapping[StepKind, AttentionBackend]

    def __call__(  # all that attention depends on
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
    ) -> Tensor:
        """Computes attention of every query over the cached keys of its own sequence."""
        numbers, scales = slots.parts(cache, q.shape[2])
        options = AttentionOptions(scale, window, cap, sinks, is_fixed)
        return self._for(meta).attend(q, numbers, meta, options, scales)

    @property
    def identity(self) -> str:
        """Names the libraries that compute, as bits depend on them; empty without any."""
        return ", ".join(f"{kind.value} by {one.version}" for kind, one in self.of_kind.items() if one is not OURS)

    @property
    def records_prompts(self) -> bool:
        """Whether steps with prompts of any size can be recorded."""
        return self.of_kind.get(StepKind.PREFILL, OURS).supported.is_recorded

    def _for(self, meta: AttentionMetadata) -> AttentionBackend:
        rows = meta.ragged
        found = self.of_kind.get(kind_of(rows), OURS)
        if rows.tree is not None or rows.shared is not None or rows.ends is not None:
            return OURS
        return found if found.supported.is_recorded or meta.on_device is None else OURS
