"""Computes steps on the device alone: inputs, forward pass and logits, and then sampling.

The inputs of such a step are on the device already or staged beforehand; the step's shape selects the recorded step.
Rows of few tokens sample behind every one, those of a mixed step behind their last. The two parts are recorded apart,
so that rows that need more than sampling do not make a step unrecorded. Sampled tokens are written to the slots' rows
at once, so the next step can be launched before the host reads them. In trees, the keys and values of accepted drafts
move to the positions that they would have in a chain. Takes slots and numbers, not requests. Ranks that compute the
same step take the same numbers (`step_numbers`), and the ids that one of them samples.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.layers.device_sides import DeviceSides, DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.device import Device, HostCopy
from sluice_server.engine.worker.graphs import GraphKey, Graphs, RowShape
from sluice_server.engine.worker.launched import BAD
from sluice_server.engine.worker.slots.state import DeviceState
from sluice_server.engine.worker.step_numbers import NO_LONGS, StepNumbers, UniformRows, form_numbers
from sluice_server.kernels import ops
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.prefixes import MOST_GROUPS
from sluice_server.kernels.layout.ragged import Ragged, SharedPrefixRows
from sluice_server.kernels.reference.inputs import StepInputs

# Returns the sampled ids, int64 [S], of a step that samples S of them; the function given samples them.
SampledIds: TypeAlias = Callable[[int, Callable[[], Tensor]], Tensor]

NO_TABLES = np.empty((0, 0), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A step of fixed shape: `forward` computes `logits` from `given` and `form`, and `sample` then `sampled`.

    Attributes:
        given, form: see `StepNumbers`.
        logits: float32 [num_sampled, V], in memory that all steps share: valid until the next forward pass.
        sampled: int64 [num_sampled], one row after the other.
    """

    key: GraphKey
    given: Tensor
    form: Tensor
    logits: Tensor
    sampled: Tensor
    forward: Callable[[], None]
    sample: Callable[[], None]


def own_ids(num: int, choose: Callable[[], Tensor]) -> Tensor:
    """The default of `SampledIds`: no other rank needs them."""
    return choose()


class UniformSteps:
    """Computes and records steps of one model over one cache."""

    def __init__(  # noqa: PLR0913 # all that a step is made of
        self,
        model: Model,
        store: BlockStore,
        state: DeviceState,
        device: Device,
        most_sampled: int,
        adapters: DeviceTables | None = None,
        sampled_ids: SampledIds = own_ids,
    ) -> None:
        """`most_sampled`: tokens that a step samples at most. `adapters`: those that rows may have. `sampled_ids`: has
        those that one of several ranks samples on all."""
        self._model = model
        self._store = store
        self._state = state
        self._device = device
        self._adapters = adapters
        self._sampled_ids = sampled_ids
        self._logits = torch.empty(most_sampled, model.num_logits, dtype=torch.float32, device=model.device)

    def record(self, key: GraphKey) -> RecordedStep:
        """Records a step of that shape."""
        step = self._blank(key)
        forward = self._device.capture(step.forward)
        return dataclasses.replace(step, forward=forward, sample=self._device.capture(step.sample))

    def launch(self, graphs: Graphs[RecordedStep], numbers: StepNumbers, num_sampled: int) -> HostCopy:
        """Begins a step and returns its pending result.

        The result is int64 [num_sampled], BAD where logits held no usable number.
        """
        step = self.forward(graphs, numbers)
        step.sample()
        return self._device.download(step.sampled[:num_sampled])

    def forward(self, graphs: Graphs[RecordedStep], numbers: StepNumbers) -> RecordedStep:
        """Begins the forward pass of a step; its logits are valid until the next one."""
        step = graphs.get(numbers.key) or self._blank(numbers.key)
        step.given.copy_(self._device.upload(numbers.given), non_blocking=True)
        if len(step.form):
            step.form.copy_(self._device.upload(numbers.form), non_blocking=True)
        step.forward()
        return step

    def _blank(self, key: GraphKey) -> RecordedStep:
        on = self._model.device
        given = torch.zeros(4, key.num_rows, dtype=torch.int64, device=on)
        form = torch.from_numpy(form_numbers(UniformRows(NO_LONGS, NO_LONGS, NO_LONGS), key)).to(on)
        sampled = torch.full((key.num_sampled,), BAD, dtype=torch.int64, device=on)
        logits, inputs = self._logits[: key.num_sampled], list[StepInputs]()

        def forward() -> None:
            inputs[:] = [self._compute(key, given, form, logits)]

        def sample() -> None:
            self._sample(key, given, form, inputs[0], logits, sampled)

        return RecordedStep(key, given, form, logits, sampled, forward, sample)

    @torch.inference_mode()
    def _compute(self, key: GraphKey, given: Tensor, form: Tensor, logits: Tensor) -> StepInputs:
        """Computes logits, and returns the inputs from which they follow."""
        state, num = self._state, key.num_tokens
        slots, starts, ends, _ = given.unbind(0)
        inputs = ops.build_inputs(state.tokens, state.tables, slots, starts, ends, state.slots.block_size, num)
        rows = self._ragged(key, slots, starts, ends)
        if key.form is RowShape.TREES:
            depths, masks, _ = form.view(3, -1)
            inputs = inputs._replace(positions=inputs.positions + depths)
            rows = dataclasses.replace(rows, tree=masks)
        if key.form is RowShape.SHARED:
            rows = dataclasses.replace(rows, shared=self._shared(key, slots, form))
        meta = self._metadata(inputs, rows, ends)
        sides = self._sides(key, slots, ends) if key.has_adapters else None
        hidden = self._model.forward(inputs.ids, inputs.positions, self._store.cache, meta, sides=sides)
        if key.form is RowShape.MIXED:
            hidden = hidden[(ends - 1).clamp(min=0)]
        self._model.write_logits(hidden, logits)
        return inputs

    @torch.inference_mode()
    def _sample(
        self, key: GraphKey, given: Tensor, form: Tensor, inputs: StepInputs, logits: Tensor, sampled: Tensor
    ) -> None:
        slots, starts, ends, samples = given.unbind(0)
        num, counts = key.num_tokens, torch.diff(ends, prepend=ends.new_zeros(1))
        is_mixed = key.form is RowShape.MIXED
        if is_mixed:
            owners, positions = slots, starts + counts
        else:
            owners, positions = slots[_rows_of(ends, num)], inputs.positions + 1

        def choose() -> Tensor:
            ids, bad = ops.sample(logits, self._state.rows(owners, positions))
            return ids.masked_fill(bad, BAD)

        ids = self._sampled_ids(key.num_sampled, choose)
        sampled.copy_(ids)
        if key.form is RowShape.TREES:
            places = ops.standing(ids, inputs.ids, form.view(3, -1)[2], ends)
            self._store.move_slots(inputs.write_slots[places], inputs.write_slots)
        kept = ids.clamp(min=0)
        if not is_mixed:
            kept = kept[(ends - counts).clamp(max=num - 1)]
        self._keep(kept, slots, positions if is_mixed else starts + 1, (counts > 0) & (samples > 0))

    def _sides(self, key: GraphKey, slots: Tensor, ends: Tensor) -> DeviceSides:
        """Returns the products beside the rows of a step, by the adapters of their slots."""
        tables, num = self._adapters, key.num_tokens
        assert tables is not None, "a step of rows with adapters where there are none"
        adapters = self._state.adapters[slots[_rows_of(ends, num)]]
        is_token = torch.arange(num, device=ends.device) < ends[-1:]  # the others are padding
        return tables.sides(torch.where(is_token, adapters, tables.no_slot))

    def _ragged(self, key: GraphKey, slots: Tensor, starts: Tensor, ends: Tensor) -> Ragged:
        zero = ends.new_zeros(1)
        return Ragged(
            starts=torch.cat([zero, ends]).int(),
            contexts=(starts + torch.diff(ends, prepend=zero)).int(),
            tables=self._state.tables[slots],
            num_tokens=key.num_tokens,
            num_rows=key.num_rows,
            has_singles=key.per_row == 1 or key.form is RowShape.MIXED,
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

    def _keep(self, ids: Tensor, slots: Tensor, at: Tensor, is_kept: Tensor) -> None:
        """Writes the first token that each row sampled to position `at` of its slot's row.

        The next step may have begun. It is a valid id in any case. Rows that sample nothing rewrite the unused place
        behind the last token; padding rows are of slot 0.
        """
        tokens = self._state.tokens
        at = torch.where(is_kept, at, tokens.shape[1] - 1)
        kept = torch.where(is_kept, ids, tokens[slots, at])
        tokens.index_put_((slots, at), kept)


def _rows_of(ends: Tensor, num: int) -> Tensor:
    """Returns the row of each of `num` tokens: int64 [num]; padding is of the last one."""
    row = torch.searchsorted(ends, torch.arange(num, device=ends.device), right=True)
    return row.clamp_(max=len(ends) - 1)
