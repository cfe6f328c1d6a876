"""What a library for attention states about itself, and the call that computes.

Takes and returns tensors and a step's metadata; loads no library.
"""

import dataclasses
import enum
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged

SHORT = 16  # tokens of a row at most, in steps that decode or verify drafts


class StepKind(enum.Enum):
    """What a step mostly computes: the next tokens of rows, or prompts, beside which rows may decode."""

    DECODE = "decode"
    PREFILL = "prefill"


def kind_of(rows: Ragged) -> StepKind:
    """Returns the kind of a step with these rows."""
    return StepKind.DECODE if rows.max_query <= SHORT else StepKind.PREFILL


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a model asks of attention.

    Attributes:
        capability: that of the GPU, 90 for 9.0.
        dtype: of queries and results.
        cache: of keys and values in the cache.
        head_dim: numbers of a head.
        has_windows, has_caps, has_sinks: whether a layer has a sliding window, caps scores, or has sinks.
        has_trees: whether drafts may branch.
    """

    capability: int
    dtype: torch.dtype
    cache: torch.dtype
    head_dim: int
    has_windows: bool = False
    has_caps: bool = False
    has_sinks: bool = False
    has_trees: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Supported:
    """What a library computes.

    Attributes:
        kinds: steps that it computes; our kernels compute the others.
        majors: major compute capabilities of GPUs.
        dtypes: of queries; the cache has the same.
        head_dims: sizes of heads.
        windows, caps, sinks: whether it knows these.
        is_recorded: whether its launches can be recorded in a graph and replayed for other rows. Else it computes only
            steps that are not recorded.
        invariance: what it keeps of batch-invariance, for people.
    """

    kinds: tuple[StepKind, ...]
    majors: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Collection[int]
    windows: bool
    caps: bool
    sinks: bool
    is_recorded: bool
    invariance: str

    def lacking(self, wanted: Wanted) -> list[str]:
        """Returns what it does not compute of what is wanted, each in words that follow "without"."""
        width = wanted.capability / 10
        checks = {
            f"GPUs of compute capability {width}": wanted.capability // 10 in self.majors,
            f"activations in {_name(wanted.dtype)}": wanted.dtype in self.dtypes,
            f"a cache in {_name(wanted.cache)} beside activations in {_name(wanted.dtype)}": wanted.cache
            is wanted.dtype,
            f"heads of {wanted.head_dim}": wanted.head_dim in self.head_dims,
            "sliding windows": self.windows or not wanted.has_windows,
            "capped scores": self.caps or not wanted.has_caps,
            "attention sinks": self.sinks or not wanted.has_sinks,
            "drafts that branch": not wanted.has_trees,
        }
        return [name for name, has in checks.items() if not has]


class AttentionBackend(Protocol):
    """Computes attention over the paged cache."""

    @property
    def name(self) -> str:
        """The name by which it is chosen."""

    @property
    def version(self) -> str:
        """Names what computes, as bits depend on it."""

    @property
    def supported(self) -> Supported:
        """What it computes."""

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        """Computes attention as `kernels.triton.attention.paged_attention` does; `meta.ragged` has the rows."""


class NotInstalled(Exception):
    """A library cannot be loaded; the text says which, and why."""


Load = Callable[[torch.device], AttentionBackend]  # raises NotInstalled


class OurKernels:
    """The Triton kernels, which compute everything; implements `AttentionBackend`."""

    name = "triton"
    version = ""
    supported = Supported(
        kinds=(StepKind.DECODE, StepKind.PREFILL),
        majors=(8, 9, 10, 12),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=range(1, 1025),
        windows=True,
        caps=True,
        sinks=True,
        is_recorded=True,
        invariance="all of it, with --batch-invariant",
    )

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        """Implements `AttentionBackend.attend`."""
        found: Tensor = gpu.family("attention").paged_attention(q, cache, meta.ragged, options, scales)
        return found


OURS = OurKernels()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
