"""The state of each slot on the device: a permanent row of tokens, blocks and sampling parameters.

The host changes rows in staged runs, which are uploaded together; the device writes what it samples itself. Takes slots
and numbers, not requests.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.plan import NO_ADAPTER, Placement
from sluice_server.engine.sampling.columns import FLOATS, INTS, neutral, pack
from sluice_server.engine.worker.device import Device
from sluice_server.kernels import ops
from sluice_server.kernels.reference.sampling import Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """The number of slots, tokens of a sequence at most, tokens of a block, tokens of a mixed step at most (0: such
    steps are not recorded), and the number of adapter slots."""

    num: int
    max_len: int
    block_size: int
    max_tokens: int = 0
    adapter_slots: int = 0


class DeviceState:
    """The rows of all slots."""

    def __init__(self, device: Device, on: torch.device, slots: Slots) -> None:
        self.slots = slots
        self._device = device
        num_slots, max_len, max_blocks = slots.num, slots.max_len, -(-slots.max_len // slots.block_size)
        # One more: a token may be sampled behind the last one that is computed.
        self.tokens = torch.zeros(num_slots, max_len + 1, dtype=torch.int64, device=on)
        self.tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=on)
        # The adapter slot of each slot's sequence; `slots.adapter_slots` stands for none.
        self.adapters = torch.full((num_slots,), slots.adapter_slots, dtype=torch.int64, device=on)
        self._floats = torch.from_numpy(neutral(FLOATS, num_slots)).to(on)
        self._ints = torch.from_numpy(neutral(INTS, num_slots)).to(on)
        self._token_runs: list[tuple[int, int, Sequence[int]]] = []
        self._block_runs: list[tuple[int, int, Sequence[int]]] = []
        self._placed: dict[int, Placement] = {}

    def place(self, placement: Placement) -> None:
        """Stages the parameters of the slot's new sequence.

        Its row of the block table keeps the blocks of the one before it behind its own: none of them is read.
        """
        self._placed[placement.slot] = placement

    def extend(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Stages `blocks` for the slot's block table, from index `first` on."""
        self._block_runs.append((slot, first, blocks))

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Stages the slot's tokens from position `first` on."""
        self._token_runs.append((slot, first, ids))

    def flush(self) -> None:
        """Begins to write what was staged."""
        if self._placed:
            self._write_parameters(list(self._placed.values()))
            self._placed = {}
        for table, runs in ((self.tables, self._block_runs), (self.tokens, self._token_runs)):
            if runs:
                for part in _apart(runs):
                    self._write_runs(table, part)
                runs.clear()

    def rows(self, slots: Tensor, positions: Tensor) -> Rows:
        """Returns the parameters of rows that sample the tokens at `positions`; both int64 [R]."""
        both = ((FLOATS, self._floats[slots]), (INTS, self._ints[slots]))
        of = {column.name: table[:, i].contiguous() for columns, table in both for i, column in enumerate(columns)}
        truncation = (of["top_k"], of["top_p"], of["min_p"], of["typical_p"])
        return Rows(of["temperature"], *truncation, of["seed"], positions, of["output"])

    def _write_parameters(self, placed: list[Placement]) -> None:
        owners = [(one.params, one.output_index) for one in placed]
        slots = self._device.upload(np.array([one.slot for one in placed], dtype=np.int64))
        self._floats[slots] = self._device.upload(pack(FLOATS, owners))
        self._ints[slots] = self._device.upload(pack(INTS, owners))
        if most := self.slots.adapter_slots:
            adapters = [most if one.adapter == NO_ADAPTER else one.adapter for one in placed]
            self.adapters[slots] = self._device.upload(np.array(adapters, dtype=np.int64))

    def _write_runs(self, table: Tensor, runs: list[tuple[int, int, Sequence[int]]]) -> None:
        slots, starts, all_ids = zip(*runs, strict=True)
        ends = list(itertools.accumulate(map(len, all_ids), initial=0))
        numbers = itertools.chain(slots, starts, ends, *all_ids)  # one array: it costs more than its numbers
        num, num_values = len(runs), ends[-1]
        packed = self._device.upload(np.fromiter(numbers, dtype=np.int64, count=3 * num + 1 + num_values))
        rows, firsts, offsets, rest = packed.split([num, num, num + 1, num_values])
        ops.write_runs_(table, rows, firsts, offsets, rest.to(table.dtype))


def _apart(runs: list[tuple[int, int, Sequence[int]]]) -> list[list[tuple[int, int, Sequence[int]]]]:
    """Splits runs into consecutive parts, each without two runs that overlap."""
    parts: list[list[tuple[int, int, Sequence[int]]]] = []
    ends: dict[int, list[tuple[int, int, int]]] = {}
    for slot, first, ids in runs:
        if not ids:
            continue
        own = ends.setdefault(slot, [])
        last = first + len(ids)
        part = 1 + max((at for at, begin, end in own if begin < last and first < end), default=-1)
        own.append((part, first, last))
        if part == len(parts):
            parts.append([])
        parts[part].append((slot, first, ids))
    return parts
