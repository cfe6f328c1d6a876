"""Computes steps on the device alone: inputs, forward pass and sampling.

The rows of such a step compute few tokens each and sample behind every one. Their inputs are on the device already or
staged beforehand; the step's shape selects the recorded step. Sampled tokens are written to the slots' rows at once, so
the next step can be launched before the host reads them. In trees, the keys and values of accepted drafts move to the
positions that they would have in a chain. Takes slots and numbers, not requests.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.device import Device, HostCopy
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape
from sluice_server.engine.worker.slots.state import DeviceState
from sluice_server.kernels import ops
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.prefixes import MOST_GROUPS, PrefixGroups
from sluice_server.kernels.layout.ragged import Longs, Ragged, SharedPrefixRows
from sluice_server.kernels.layout.trees import Trees, numbers_of
from sluice_server.kernels.reference.inputs import StepInputs

NO_LONGS = np.empty(0, dtype=np.int64)
NO_TABLES = np.empty((0, 0), dtype=np.int32)
BAD = -1  # marks a row whose logits hold no usable number


@dataclasses.dataclass(frozen=True, slots=True)
class UniformRows:
    """The rows of a step.

    Attributes:
        slots, starts, lens: per row, its slot, the position of its first token, its number of tokens.
        trees: of the rows whose drafts branch.
        prefixes: shared prefixes of rows of one token each; the rows are in `prefixes.order` already.
    """

    slots: list[int]
    starts: list[int]
    lens: list[int]
    trees: Trees = dataclasses.field(default_factory=dict)
    prefixes: PrefixGroups | None = None

    @property
    def form(self) -> RowShape:
        """The kind of recorded step that takes these rows."""
        if self.trees:
            return RowShape.TREES
        return RowShape.PLAIN if self.prefixes is None else RowShape.SHARED

    def plain(self) -> "UniformRows":
        """Returns the same rows without shared prefixes."""
        return dataclasses.replace(self, prefixes=None)


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A step of fixed shape: `run` computes `sampled` from `given` and `form`.

    Attributes:
        given: int64 [3, R]: slots, positions of the first tokens, tokens up to each row's last.
        form: int64, further numbers that the rows' form needs: see `_numbers`.
        sampled: int64 [R * per_row], of the rows' tokens one row after the other.
    """

    key: GraphKey
    given: Tensor
    form: Tensor
    sampled: Tensor
    run: Callable[[], None]


class UniformSteps:
    """Computes and records uniform steps of one model over one cache."""

    def __init__(self, model: Model, store: BlockStore, state: DeviceState, device: Device) -> None:
        self._model = model
        self._store = store
        self._state = state
        self._device = device

    def record(self, key: GraphKey) -> RecordedStep:
        """Records a step of that shape."""
        step = self._blank(key)
        return dataclasses.replace(step, run=self._device.capture(step.run))

    def launch(self, graphs: Graphs[RecordedStep], rows: UniformRows) -> HostCopy:
        """Begins a step and returns its pending result.

        The result is int64 [sum of lens], BAD where logits held no usable number.
        """
        num, per_row = len(rows.slots), max(rows.lens)
        step = graphs.find(num, per_row, rows.form)
        if step is None and rows.prefixes is not None:  # the step may be recorded for plain rows
            rows = rows.plain()
            step = graphs.find(num, per_row)
        step = step or self._blank(GraphKey(num, per_row, rows.form))
        given = np.zeros((3, step.key.num_rows), dtype=np.int64)
        given[0, :num], given[1, :num] = rows.slots, rows.starts
        given[2, :num] = np.cumsum(rows.lens)
        given[2, num:] = given[2, num - 1]  # padding rows have no token
        step.given.copy_(self._device.upload(given), non_blocking=True)
        if len(step.form):
            step.form.copy_(self._device.upload(_numbers(rows, step.key)), non_blocking=True)
        step.run()
        return self._device.download(step.sampled[: sum(rows.lens)])

    def _blank(self, key: GraphKey) -> RecordedStep:
        on = self._model.device
        given = torch.zeros(3, key.num_rows, dtype=torch.int64, device=on)
        form = torch.from_numpy(_numbers(UniformRows([], [], []), key)).to(on)
        sampled = torch.full((key.num_rows * key.per_row,), BAD, dtype=torch.int64, device=on)
        return RecordedStep(key, given, form, sampled, lambda: self._compute(key, given, form, sampled))

    @torch.inference_mode()
    def _compute(self, key: GraphKey, given: Tensor, form: Tensor, sampled: Tensor) -> None:
        state, num = self._state, len(sampled)
        slots, starts, ends = given.unbind(0)
        inputs = ops.build_inputs(state.tokens, state.tables, slots, starts, ends, state.slots.block_size, num)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        rows = self._ragged(key, slots, starts, ends)
        tree = form.view(3, -1) if key.form is RowShape.TREES else None
        if tree is not None:
            inputs = inputs._replace(positions=inputs.positions + tree[0])
            rows = dataclasses.replace(rows, tree=tree[1])
        if key.form is RowShape.SHARED:
            rows = dataclasses.replace(rows, shared=self._shared(key, slots, form))
        meta = self._metadata(inputs, rows, ends)
        hidden = self._model.forward(inputs.ids, inputs.positions, self._store.cache, meta)
        row = torch.searchsorted(ends, torch.arange(num, device=ends.device), right=True).clamp_(max=key.num_rows - 1)
        ids, bad = ops.sample(self._model.logits(hidden), state.rows(slots[row], inputs.positions + 1))
        ids = ids.masked_fill(bad, BAD)
        sampled.copy_(ids)
        if tree is not None:
            places = ops.standing(ids, inputs.ids, tree[2], ends)
            self._store.move_slots(inputs.write_slots[places], inputs.write_slots)
        self._keep(ids.clamp(min=0)[(ends - counts).clamp(max=num - 1)], slots, starts, counts)

    def _ragged(self, key: GraphKey, slots: Tensor, starts: Tensor, ends: Tensor) -> Ragged:
        zero = ends.new_zeros(1)
        return Ragged(
            starts=torch.cat([zero, ends]).int(),
            contexts=(starts + torch.diff(ends, prepend=zero)).int(),
            tables=self._state.tables[slots],
            num_tokens=key.num_rows * key.per_row,
            num_rows=key.num_rows,
            num_singles=key.num_rows if key.per_row == 1 else 0,
            max_query=key.per_row,
            max_context=self._state.slots.max_len,
        )

    def _shared(self, key: GraphKey, slots: Tensor, form: Tensor) -> SharedPrefixRows:
        starts, lengths, prefixes = form.int().split([MOST_GROUPS + 1, MOST_GROUPS, key.num_rows])
        leaders = slots[form[:MOST_GROUPS].clamp(max=key.num_rows - 1)]
        return SharedPrefixRows(
            starts=starts,
            lengths=lengths,
            tables=self._state.tables[leaders],
            prefixes=prefixes,
            max_rows=key.num_rows,
            max_length=self._state.slots.max_len,
        )

    def _metadata(self, inputs: StepInputs, rows: Ragged, ends: Tensor) -> AttentionMetadata:
        return AttentionMetadata(
            num_tokens=rows.num_tokens,
            counts=NO_LONGS,
            contexts=NO_LONGS,
            tables=NO_TABLES,
            block_size=self._state.slots.block_size,
            positions=inputs.positions,
            write_slots=inputs.write_slots,
            last_tokens=ends - 1,
            on_device=rows,
        )

    def _keep(self, first: Tensor, slots: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Writes the token sampled behind each row's first token to the slot's row; the next step may have begun.

        It is a valid id in any case. Padding rows, which are of slot 0, rewrite the unused place behind the last token.
        """
        tokens = self._state.tokens
        is_row = counts > 0
        at = torch.where(is_row, starts + 1, tokens.shape[1] - 1)
        kept = torch.where(is_row, first, tokens[slots, at])
        tokens.index_put_((slots, at), kept)


def _numbers(rows: UniformRows, key: GraphKey) -> Longs:
    """Returns the numbers that the form of a step's rows needs.

    For trees: see `kernels.layout.trees.numbers_of`. For shared prefixes: each group's first row (one more than there
    are groups), the keys of its prefix, and the keys of each row's prefix.
    """
    if key.form is RowShape.TREES:
        return numbers_of(rows.lens, rows.trees, key.num_rows * key.per_row).reshape(-1)
    if key.form is RowShape.PLAIN:
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
