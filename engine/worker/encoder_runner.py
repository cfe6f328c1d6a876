"""Computes the plans of an encoder, which sees its whole input at once: a `StepRunner` without a cache.

A plan carries an input in chunks, as that of a decoder does. They are kept by slot, and the input is computed in the
step that brings its last chunk. The inputs that end in a step are computed together, a budget of tokens at a time.
Depends on plans, not on requests, scheduling policy or text.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.encoders.model import Encoder, EncoderInput
from sluice_server.engine.plan import Placement, StepPlan, StepResult
from sluice_server.engine.request import Pooling
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.runner import CompletedStep
from sluice_server.engine.worker.slots.pooling import with_vectors


@dataclasses.dataclass(slots=True)
class _SlotInput:
    """The input in a slot, as far as plans have brought it."""

    pooling: Pooling
    num_first: int | None
    chunks: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # ids by the first one's position

    def whole(self, num: int) -> EncoderInput:
        """Returns the input of `num` tokens."""
        ids = [token for start in sorted(self.chunks) for token in self.chunks[start]]
        assert len(ids) == num, f"an input of {num} tokens has chunks of {len(ids)}"
        return EncoderInput(ids, self.num_first)


class EncoderRunner:
    """Runs one encoder."""

    depth = 0  # `launch` returns when the step is done

    def __init__(self, model: Encoder, max_num_tokens: int) -> None:
        """`max_num_tokens` are computed at a time, or one longer input."""
        self._model = model
        self._max_num_tokens = max_num_tokens
        self._slots: dict[int, _SlotInput] = {}

    @property
    def progress(self) -> int:
        """The number of layers computed since start."""
        return self._model.layers_done

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Sets the callback that runs after each layer, so that the process stays responsive during a long step."""
        self._model.on_layer = on_layer

    def move(self, moves: list[Move]) -> None:
        """Does nothing: without a cache there is nothing to move."""
        assert not moves, "an encoder has no cache blocks"

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns nothing: no transfer was ever begun."""
        return []

    def place(self, plan: StepPlan) -> None:
        """Resets newly taken slots."""
        for placement in plan.placements:
            self._place(placement)

    def idle(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False

    def launch(self, plan: StepPlan) -> CompletedStep:
        """Computes the inputs that end in this plan. Raises OutOfDeviceMemory for a lack of memory."""
        ended = self._take(plan)
        vectors: dict[int, Tensor] = {}
        with device_faults():
            for rows in self._batches(ended):
                hidden = self._model.forward([ended[i] for i in rows])
                for i, states in zip(rows, hidden, strict=True):
                    vectors[i] = self._model.pooled(states, self._slots[plan.slots[i]].pooling)
        return CompletedStep(with_vectors(StepResult([-1] * len(plan.slots)), vectors))

    def _place(self, placement: Placement) -> None:
        """Sets what is pooled in a slot. A sequence that runs may be placed again: its chunks stay until its input
        begins anew."""
        assert placement.pooling is not None, "an encoder generates nothing"
        kept = self._slots.get(placement.slot)
        chunks = kept.chunks if kept is not None else {}
        self._slots[placement.slot] = _SlotInput(placement.pooling, placement.num_first, chunks)

    def _take(self, plan: StepPlan) -> dict[int, EncoderInput]:
        """Keeps the plan's chunks; returns the inputs that are complete with them, by row."""
        ended, at = {}, 0
        for i, (slot, start, num) in enumerate(zip(plan.slots, plan.starts, plan.query_lens, strict=True)):
            held = self._slots[slot]
            if not start:
                held.chunks.clear()
            held.chunks[start] = plan.token_ids[at : at + num]
            at += num
            if plan.pools.get(i):
                ended[i] = held.whole(start + num)
        return ended

    def _batches(self, inputs: Mapping[int, EncoderInput]) -> Iterator[list[int]]:
        """Yields the rows of inputs that are computed together."""
        rows: list[int] = []
        size = 0
        for i, one in inputs.items():
            if rows and size + len(one.ids) > self._max_num_tokens:
                yield rows
                rows, size = [], 0
            rows.append(i)
            size += len(one.ids)
        if rows:
            yield rows
