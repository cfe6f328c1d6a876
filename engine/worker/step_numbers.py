"""What the host knows of a step that computes on the device alone: its rows, and the numbers that the device needs.

The numbers are those of the recorded step that takes the rows, with its padding. NumPy alone: no tensors.
"""

import dataclasses
from typing import Protocol, TypeVar

import numpy as np

from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape
from sluice_server.kernels.layout.prefixes import MOST_GROUPS, PrefixGroups
from sluice_server.kernels.layout.ragged import Longs
from sluice_server.kernels.layout.trees import Trees, numbers_of

NO_LONGS = np.empty(0, dtype=np.int64)


class Keyed(Protocol):
    """A recorded step, as far as it matters here."""

    @property
    def key(self) -> GraphKey:
        """Its shape."""


S = TypeVar("S", bound=Keyed)


@dataclasses.dataclass(frozen=True, slots=True)
class UniformRows:
    """The rows of a step.

    Attributes:
        slots, starts, lens: int64 [R], per row, its slot, the position of its first token, its number of tokens.
        trees: of the rows whose drafts branch.
        prefixes: shared prefixes of rows of one token each; the rows are in `prefixes.order` already.
        samples: of a mixed step, whether each row samples behind its last token; None: every row behind every token.
        has_adapters: whether some rows have adapters.
    """

    slots: Longs
    starts: Longs
    lens: Longs
    trees: Trees = dataclasses.field(default_factory=dict)
    prefixes: PrefixGroups | None = None
    samples: list[bool] | None = None
    has_adapters: bool = False

    @property
    def num_sampled(self) -> int:
        """The number of tokens that are sampled, or that could be, in a mixed step."""
        return int(self.lens.sum()) if self.samples is None else len(self.lens)

    @property
    def shape(self) -> GraphKey:
        """What `Graphs.find` looks for."""
        per_row = self.lens.max() if self.samples is None else self.lens.sum()
        return GraphKey(len(self.slots), int(per_row), self.form, self.has_adapters)

    @property
    def form(self) -> RowShape:
        """The kind of recorded step that takes these rows."""
        if self.samples is not None:
            return RowShape.MIXED
        if self.trees:
            return RowShape.TREES
        return RowShape.PLAIN if self.prefixes is None else RowShape.SHARED

    def plain(self) -> "UniformRows":
        """Returns the same rows without shared prefixes."""
        return dataclasses.replace(self, prefixes=None)


@dataclasses.dataclass(frozen=True, slots=True)
class StepNumbers:
    """What a step of some shape computes from, besides the state of its slots.

    Attributes:
        given: int64 [4, R]: slots, positions of the first tokens, tokens up to each row's last, whether it samples.
        form: int64, further numbers that the rows' form needs: see `form_numbers`.
    """

    key: GraphKey
    given: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    form: Longs


def numbers_of_step(graphs: Graphs[S], rows: UniformRows) -> StepNumbers:
    """Returns the numbers of a step of these rows: of the least recorded one that takes them, if there is one."""
    shape = rows.shape
    step = graphs.find(*shape)
    if step is None and rows.prefixes is not None:  # the step may be recorded for plain rows
        rows = rows.plain()
        shape = rows.shape
        step = graphs.find(*shape)
    key, num = shape if step is None else step.key, len(rows.slots)
    given = np.zeros((4, key.num_rows), dtype=np.int64)
    given[0, :num], given[1, :num] = rows.slots, rows.starts
    np.cumsum(rows.lens, out=given[2, :num])
    given[2, num:] = given[2, num - 1]  # padding rows have no token
    given[3, :num] = True if rows.samples is None else rows.samples
    return StepNumbers(key, given, form_numbers(rows, key))


def form_numbers(rows: UniformRows, key: GraphKey) -> Longs:
    """Returns the numbers that the form of a step's rows needs.

    For trees: see `kernels.layout.trees.numbers_of`. For shared prefixes: each group's first row (one more than there
    are groups), the keys of its prefix, and the keys of each row's prefix.
    """
    if key.form is RowShape.TREES:
        return numbers_of(rows.lens.tolist(), rows.trees, key.num_tokens).reshape(-1)
    if key.form is not RowShape.SHARED:
        return NO_LONGS
    firsts, lengths = np.zeros(MOST_GROUPS + 1, dtype=np.int64), np.zeros(MOST_GROUPS, dtype=np.int64)
    each = np.zeros(key.num_rows, dtype=np.int64)
    if rows.prefixes is not None:
        num, sizes = len(rows.prefixes.sizes), rows.prefixes.sizes
        firsts[1 : num + 1] = np.cumsum(sizes)
        firsts[num + 1 :] = firsts[num]  # unused groups have no rows
        lengths[:num] = rows.prefixes.lengths
        each[: firsts[num]] = np.repeat(lengths[:num], sizes)
    return np.concatenate([firsts, lengths, each])
