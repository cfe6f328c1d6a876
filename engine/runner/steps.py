"""Steps whose rows compute few tokens each and sample behind every one: inputs, forward and sampling without the host.

What a step needs is on the device already, or staged beforehand; which recorded step takes it follows from its shape.
What is sampled is written to the rows at once, so that the next step may be launched before anybody has seen it. Knows
rows and numbers; nothing of requests.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.models.model import Model
from engine.runner.device import Arrival, Device
from engine.runner.graphs import Graphs, Key
from engine.runner.state import DeviceState
from kernels import ops
from kernels.metadata import AttentionMetadata
from kernels.ragged import Ragged

NO_LONGS = np.empty(0, dtype=np.int64)
NO_TABLES = np.empty((0, 0), dtype=np.int32)
BAD = -1  # what stands for a row that holds no usable number


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A step of fixed shape: `run` computes what `given` says into `sampled`.

    Attributes:
        given: int64 [3, R]: slots, positions of the first tokens, tokens up to each row's last.
        sampled: int64 [R * per_row], of the rows' tokens one row after the other.
    """

    key: Key
    given: Tensor
    sampled: Tensor
    run: Callable[[], None]


class UniformSteps:
    """One model over one cache."""

    def __init__(self, model: Model, cache: list[Tensor], state: DeviceState, device: Device) -> None:
        self._model = model
        self._cache = cache
        self._state = state
        self._device = device

    def record(self, key: Key) -> Recorded:
        """Capture a step of that shape."""
        step = self._blank(key)
        return dataclasses.replace(step, run=self._device.capture(step.run))

    def launch(self, graphs: Graphs[Recorded], slots: list[int], starts: list[int], lens: list[int]) -> Arrival:
        """Begin a step of rows of so many tokens; its result int64 [sum of lens] is on its way, BAD where there is no
        usable number."""
        num, per_row = len(slots), max(lens)
        step = graphs.find(num, per_row) or self._blank(Key(num, per_row))
        given = np.zeros((3, step.key.num_rows), dtype=np.int64)
        given[0, :num], given[1, :num] = slots, starts
        given[2, :num] = np.cumsum(lens)
        given[2, num:] = given[2, num - 1]  # padding rows have no token
        step.given.copy_(self._device.upload(given), non_blocking=True)
        step.run()
        return self._device.download(step.sampled[: sum(lens)])

    def _blank(self, key: Key) -> Recorded:
        on = self._model.device
        given = torch.zeros(3, key.num_rows, dtype=torch.int64, device=on)
        sampled = torch.full((key.num_rows * key.per_row,), BAD, dtype=torch.int64, device=on)
        return Recorded(key, given, sampled, lambda: self._compute(key, given, sampled))

    @torch.inference_mode()
    def _compute(self, key: Key, given: Tensor, sampled: Tensor) -> None:
        state, (num_rows, per_row), num = self._state, key, len(sampled)
        slots, starts, ends = given.unbind(0)
        inputs = ops.build_inputs(state.tokens, state.tables, slots, starts, ends, state.slots.block_size, num)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        rows = Ragged(
            starts=torch.cat([ends.new_zeros(1), ends]).int(),
            contexts=(starts + counts).int(),
            tables=state.tables[slots],
            num_tokens=num,
            num_rows=num_rows,
            num_singles=num_rows if per_row == 1 else 0,
            max_query=per_row,
            max_context=state.slots.max_len,
        )
        meta = AttentionMetadata(
            num_tokens=num,
            counts=NO_LONGS,
            contexts=NO_LONGS,
            tables=NO_TABLES,
            block_size=state.slots.block_size,
            positions=inputs.positions,
            write_slots=inputs.write_slots,
            last_tokens=ends - 1,
            on_device=rows,
        )
        hidden = self._model.forward(inputs.ids, inputs.positions, self._cache, meta)
        row = torch.searchsorted(ends, torch.arange(num, device=ends.device), right=True).clamp_(max=num_rows - 1)
        positions = inputs.positions + 1
        ids, bad = ops.sample(self._model.logits(hidden), state.rows(slots[row], positions))
        sampled.copy_(ids.masked_fill(bad, BAD))
        self._keep(ids.masked_fill(bad, 0)[(ends - counts).clamp(max=num - 1)], slots, starts, counts)

    def _keep(self, first: Tensor, slots: Tensor, starts: Tensor, counts: Tensor) -> None:
        """What was sampled behind each row's first token stands in its row, an id in any case: the step behind it may
        have begun. Padding rows, which are of slot 0, write what is there to the place behind the last, which nobody
        reads."""
        tokens = self._state.tokens
        is_row = counts > 0
        at = torch.where(is_row, starts + 1, tokens.shape[1] - 1)
        kept = torch.where(is_row, first, tokens[slots, at])
        tokens.index_put_((slots, at), kept)
