"""Records the passes of a drafter on a GPU, and replays them.

Nearly all passes have one of two sizes: a token for each row, or, before the first draft, what the last step accepted.
They are recorded at start for as many rows as the target's steps are. A pass that reads a prompt is computed. Sampling
of drafts is not recorded. Takes tokens, block tables and numbers, not requests.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.speculation.draft_passes import ComputedPasses, DraftPass, EndStates
from sluice_server.engine.speculation.drafters import Drafter
from sluice_server.engine.worker.device import Device
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import Longs, Ragged

NO_LONGS = np.empty(0, dtype=np.int64)
NO_TABLES = np.empty((0, 0), dtype=np.int32)
HOST = torch.device("cpu")
MODEL_TOKENS = 2  # most tokens of a row that a model has not read: the last draft, if it was kept, and one behind it


class PassSizes(NamedTuple):
    """The sizes of recorded passes: rows, entries of a row and drafts of a row at most."""

    num_rows: int
    max_len: int
    max_drafts: int


@dataclasses.dataclass(frozen=True)
class RecordedPass:
    """A pass of fixed shape, and the memory that it reads and writes.

    Attributes:
        given: int64 [3 · tokens + 2 · rows]: ids, positions and cache slots of its tokens; the tokens up to each row's
            last, and each row's entries.
        tables: int32 [rows, blocks], in memory that all passes share.
        states: [rows, hidden], the drafter's own before each token; None where these are not read.
        hidden: [rows, hidden] behind each row's last token.
        logits: float32 [rows, V], in memory that all passes share.
        replay: computes `hidden` and `logits`.
    """

    key: GraphKey
    given: Tensor
    tables: Tensor
    states: Tensor | None
    hidden: Tensor
    logits: Tensor
    replay: Callable[[], None]


class RecordedPasses:
    """Replays the passes that are recorded and computes the others."""

    def __init__(
        self, drafter: Drafter, cache: list[Tensor], block_size: int, sizes: PassSizes, device: Device
    ) -> None:
        """`cache`: from `Drafter.new_cache`. Nothing is recorded before `warm`."""
        self.drafter = drafter
        self.block_size = block_size
        self._computed = ComputedPasses(drafter, cache, block_size)
        self._cache = cache
        self._sizes = sizes
        self._device = device
        # Block tables as they are on the device, and its memory: most passes have those of the pass before.
        self._held = np.zeros((sizes.num_rows, -(-sizes.max_len // block_size)), dtype=np.int32)
        self._tables = torch.from_numpy(self._held).to(drafter.device, copy=True)
        self._logits = torch.empty(sizes.num_rows, drafter.vocab_size, dtype=torch.float32, device=drafter.device)
        # What a row has to read before its first draft: a head reads all accepted tokens again.
        most = 1 + sizes.max_drafts if drafter.lag else MODEL_TOKENS
        self._first = self._graphs({1, most}, reads_states=False)
        self._next = self._graphs({1}, reads_states=True) if drafter.lag else self._first

    def warm(self) -> None:
        """Records all passes."""
        for graphs in self._all:
            graphs.warm()

    def bytes_of_all(self) -> int:
        """Returns about how many bytes recorded passes take, beside the cache. Nothing is kept."""
        own = self._logits.nbytes + self._tables.nbytes
        return own + sum(graphs.bytes_of_all(self._device.taken) for graphs in self._all)

    def compute(self, one: DraftPass) -> EndStates | None:
        """Implements `DraftPasses.compute`."""
        graphs = self._first if one.states is None else self._next
        step = graphs.find(len(one.nums), max(one.nums)) if one.ends else None
        if step is None or max(one.contexts) > self._sizes.max_len or one.tables.shape[1] > step.tables.shape[1]:
            return self._computed.compute(one)
        step.given.copy_(self._device.upload(self._numbers(one, step.key)), non_blocking=True)
        num, width = one.tables.shape
        if not np.array_equal(self._held[:num, :width], one.tables):
            self._held[:num, :width] = one.tables
            step.tables[:num, :width].copy_(self._device.upload(one.tables), non_blocking=True)
        if step.states is not None and one.states is not None:
            step.states[:num].copy_(one.states)
        step.replay()
        if one.ends == list(range(num)):
            return EndStates(step.hidden[:num], step.logits[:num])
        ends = self._device.upload(np.array(one.ends, dtype=np.int64))
        return EndStates(step.hidden[ends], step.logits[ends])

    @property
    def _all(self) -> tuple[Graphs[RecordedPass], ...]:
        return (self._first, self._next) if self._next is not self._first else (self._first,)

    def _graphs(self, per_row: set[int], *, reads_states: bool) -> Graphs[RecordedPass]:
        graphs = Graphs(
            self._sizes.num_rows,
            [(num, RowShape.PLAIN) for num in sorted(per_row)],
            lambda key: self._record(key, reads_states=reads_states),
        )
        graphs.give_up()  # a small model's passes of few more rows cost little
        return graphs

    def _record(self, key: GraphKey, *, reads_states: bool) -> RecordedPass:
        on, rows = self.drafter.device, key.num_rows
        given = torch.zeros(3 * key.num_tokens + 2 * rows, dtype=torch.int64, device=on)
        given[2 * key.num_tokens : 3 * key.num_tokens] = -1  # runs before a capture write no entry
        hidden = torch.zeros(rows, self.drafter.hidden_size, device=on)
        states = torch.zeros_like(hidden) if reads_states else None
        step = RecordedPass(key, given, self._tables[:rows], states, hidden, self._logits[:rows], lambda: None)
        return dataclasses.replace(step, replay=self._device.capture(lambda: self._compute(step)))

    @torch.inference_mode()
    def _compute(self, step: RecordedPass) -> None:
        """Computes a pass from the memory of a step."""
        num, rows = step.key.num_tokens, step.key.num_rows
        ids, positions, write_slots, ends, contexts = step.given.split([num, num, num, rows, rows])
        on_device = Ragged(
            starts=torch.cat([ends.new_zeros(1), ends]).int(),
            contexts=contexts.int(),
            tables=step.tables,
            num_tokens=num,
            num_rows=rows,
            has_singles=step.key.per_row == 1,
            max_query=step.key.per_row,
            max_context=self._sizes.max_len,
        )
        meta = AttentionMetadata(
            num_tokens=num,
            counts=NO_LONGS,
            contexts=NO_LONGS,
            tables=NO_TABLES,
            block_size=self.block_size,
            positions=positions,
            write_slots=write_slots,
            last_tokens=ends - 1,
            on_device=on_device,
        )
        # A head computes in the memory of the states that it gets, and these are given anew for each replay.
        hidden = self.drafter.forward(ids, self._cache, meta, step.states)
        step.hidden.copy_(hidden[(ends - 1).clamp(min=0)])
        step.logits.copy_(self.drafter.logits(step.hidden))

    def _numbers(self, one: DraftPass, key: GraphKey) -> Longs:
        """Returns `RecordedPass.given` of a pass; what is behind it in a row of padding is written nowhere."""
        meta = AttentionMetadata.build(one.nums, one.contexts, one.tables, self.block_size, HOST)
        tokens, rows = key.num_tokens, key.num_rows
        given = np.zeros(3 * tokens + 2 * rows, dtype=np.int64)
        ids, positions, slots, ends, contexts = np.split(given, np.cumsum([tokens, tokens, tokens, rows]))
        ids[: meta.num_tokens], positions[: meta.num_tokens] = one.ids, meta.positions.numpy()
        slots[:] = -1
        slots[: meta.num_tokens] = meta.write_slots.numpy()
        ends[: len(one.nums)] = np.cumsum(one.nums)
        ends[len(one.nums) :] = meta.num_tokens
        contexts[: len(one.nums)] = one.contexts
        return given


def recorded_pass_bytes(
    drafter: Drafter, cache_dtype: torch.dtype, block_size: int, sizes: PassSizes, device: Device
) -> int:
    """Returns about how many bytes recorded passes will take on the device, measured over a cache of one block.
    `device` must not be used afterwards."""
    passes = RecordedPasses(drafter, drafter.new_cache(1, block_size, cache_dtype), block_size, sizes, device)
    return passes.bytes_of_all()
