"""A runner for devices that work while the host plans: a step is launched before the one before it is collected.

A step is uniform if its rows only decode or verify drafts and need nothing but sampling. Uniform steps go to
`UniformSteps`, others to the plain `Runner`, which waits for the device. Scheduling policy is decided elsewhere; the
input is a `StepPlan`.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.tiers import Move
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import (
    IN_FLIGHT,
    NO_ADAPTER,
    Placement,
    StepPlan,
    StepResult,
    VerifiedDrafts,
    num_accepted,
)
from sluice_server.engine.speculation.trees import walk
from sluice_server.engine.worker.device import Device, HostCopy
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.forward import trees_of
from sluice_server.engine.worker.graphs import Graphs, RowShape, forms_of
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.engine.worker.runner import CompletedStep, Runner
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.engine.worker.steps import BAD, RecordedStep, UniformRows, UniformSteps

logger = logging.getLogger(__name__)

UNKNOWN = -1  # the device has written no token of the slot itself


class InFlightDrafts(NamedTuple):
    """The drafts for which steps are recorded.

    Attributes:
        lengths: numbers of drafts of a row; there are recorded steps for rows of at most so many.
        may_branch: whether several drafts may follow the same token.
    """

    lengths: tuple[int, ...]
    may_branch: bool = False


NO_DRAFTS = InFlightDrafts(())


class LaunchedStep:
    """A step that the device is computing."""

    is_done = False

    def __init__(self, plan: StepPlan, arrival: HostCopy, order: Sequence[int] = ()) -> None:
        """Holds the plan and the pending result; `order`: the order of the rows on the device, if it differs."""
        self._plan = plan
        self._arrival = arrival
        self._order = order
        self._result: StepResult | None = None

    def collect(self) -> StepResult:
        """Waits for the device and returns the sampled tokens."""
        if self._result is None:
            ids, ends = self._arrival.wait().tolist(), itertools.accumulate(self._plan.query_lens)
            rows = [ids[end - num : end] for end, num in zip(ends, self._plan.query_lens, strict=True)]
            if self._order:  # such rows have one token each
                rows = [row for _, row in sorted(zip(self._order, rows, strict=True))]
            self._result = result_of(self._plan, rows)
        return self._result

    def sampled(self) -> dict[int, int]:
        """Returns the first token that each slot sampled."""
        return dict(zip(self._plan.slots, self.collect().token_ids, strict=True))


def result_of(plan: StepPlan, rows: list[list[int]]) -> StepResult:
    """Returns the result of a uniform step, given the sampled ids of each row.

    What is behind a wrong draft is ignored.
    """
    failed, runs, end = set(), {}, 0
    for i, ids in enumerate(rows):
        end += len(ids)
        drafts, parents = plan.drafted(i, end), plan.parents.get(i)
        if parents is None:
            run, standing = ids, ids[: 1 + num_accepted(drafts, ids)]
        else:
            run = standing = [ids[0], *(ids[1 + j] for j in walk(drafts, parents, ids))]
        if BAD in standing:
            failed.add(i)
        elif drafts:
            runs[i] = VerifiedDrafts(tuple(run))
    return StepResult([ids[0] for ids in rows], frozenset(failed), runs=runs)


class OverlappedRunner:
    """Runs uniform steps with `UniformSteps` and the state on the device, and other steps with `plain`."""

    depth = 1  # the device computes one step while the next is planned

    def __init__(
        self,
        plain: Runner,
        steps: UniformSteps,
        state: DeviceState,
        device: Device,
        graphs: Graphs[RecordedStep],
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self._plain = plain
        self._steps = steps
        self._state = state
        self._device = device
        self._graphs = graphs
        self._prefixes = prefixes
        num_slots = len(state.tokens)
        self._is_plain = [False] * num_slots  # whether the slot needs nothing but sampling
        self._ahead = [UNKNOWN] * num_slots  # position of the newest token that the device has written itself
        self._last: LaunchedStep | None = None
        self._num_steps = 0

    @property
    def progress(self) -> int:
        """The number of layers and recorded steps computed since start."""
        return self._plain.progress + self._num_steps

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Sets the callback that runs after each layer that is computed outside recorded steps."""
        self._plain.watch(on_layer)

    def move(self, moves: list[Move]) -> None:
        """Carries out transfers on a queue of their own, behind the steps begun before."""
        with self._device.aside():
            self._plain.move(moves)

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the disk transfers that have ended since the last call, and whether they succeeded."""
        return self._plain.moved()

    def place(self, plan: StepPlan) -> None:
        """Resets newly taken slots, then appends new blocks to the block tables."""
        self._plain.place(plan)
        for placement in plan.placements:
            self._is_plain[placement.slot] = wants_only_sampling(placement)
            self._ahead[placement.slot] = UNKNOWN
            self._state.place(placement)
        if plan.placements and self._prefixes is not None:
            self._prefixes.forget()
        for run in plan.new_blocks:
            self._state.extend(run.slot, run.first, run.blocks)

    def launch(self, plan: StepPlan) -> "LaunchedStep | CompletedStep":
        """Begins a step; it may be launched before the one before it is collected."""
        with device_faults():
            self._device.join()
            if not self._is_uniform(plan):
                return self._plain.launch(self._known(plan))
            return self._launch(plan)

    def idle(self) -> bool:
        """Records one more step; returns False when none is left. Called only while no requests wait."""
        try:
            with device_faults():
                return self._graphs.grow()
        except OutOfDeviceMemory:
            num = self._graphs.give_up() + 1
            logger.warning("no device memory to record more steps: %d sizes are computed without", num)
            return False

    def _is_uniform(self, plan: StepPlan) -> bool:
        """Returns whether every row samples behind each of its tokens and needs nothing but sampling."""
        drafts = plan.drafts
        return all(
            samples and self._is_plain[slot] and drafts.get(i, 0) == length - 1
            for i, (slot, length, samples) in enumerate(zip(plan.slots, plan.query_lens, plan.samples, strict=True))
        )

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        end = 0
        for slot, start, num in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            end += num
            ids = plan.token_ids[end - num : end]
            if self._ahead[slot] != start or num > 1:
                assert IN_FLIGHT not in ids, f"slot {slot}: the token at {start} is on no device"
                self._state.note(slot, start, ids)
            self._ahead[slot] = start + 1 if num == 1 else UNKNOWN
        self._state.flush()
        rows = self._rows(plan)
        order: Sequence[int] = () if rows.prefixes is None else rows.prefixes.order
        self._last = LaunchedStep(plan, self._steps.launch(self._graphs, rows), order)
        self._num_steps += 1
        return self._last

    def _rows(self, plan: StepPlan) -> UniformRows:
        """Returns the rows in the order of computation: rows that share prefixes are adjacent where that pays off."""
        slots, starts, lens = plan.slots, plan.starts, plan.query_lens
        found = None
        if self._prefixes is not None and len(slots) > 1 and max(lens) == 1:
            found = self._prefixes.find(slots, starts)
        if found is None:
            return UniformRows(slots, starts, lens, trees_of(plan))
        return UniformRows([slots[i] for i in found.order], [starts[i] for i in found.order], lens, prefixes=found)

    def _known(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the token ids of the step in flight, after waiting for it."""
        if self._last is None or IN_FLIGHT not in plan.token_ids:
            return plan
        return plan.known(self._last.sampled())


def overlap(
    plain: Runner, model: Model, store: BlockStore, device: Device, slots: Slots, drafts: InFlightDrafts = NO_DRAFTS
) -> OverlappedRunner:
    """Builds an overlapped runner around a plain one and records the steps that every start needs.

    These are plain decode steps and those with drafts. Steps of rows that share a prefix are recorded while idle.
    """
    state = DeviceState(device, model.device, slots)
    state.note(0, 0, [0])  # compiles the kernels that write to rows
    state.extend(0, 0, [0])
    state.flush()
    steps = UniformSteps(model, store, state, device)
    graphs = new_graphs(model, steps, slots, drafts)
    graphs.warm()
    prefixes = SharedPrefixes(plain.block_tables, slots.block_size) if may_share(model) else None
    return OverlappedRunner(plain, steps, state, device, graphs, prefixes)


def recorded_bytes(
    model: Model, cache_dtype: torch.dtype, device: Device, slots: Slots, drafts: InFlightDrafts = NO_DRAFTS
) -> int:
    """Returns the bytes that recorded steps and slot state will take on the device, beside weights and cache.

    Measured over a cache of one block, before the real cache exists. `device` must not be used afterwards: the runner
    takes another.
    """
    before = device.taken()
    state = DeviceState(device, model.device, slots)
    own = device.taken() - before
    store = BlockStore(model.new_cache(1, slots.block_size, cache_dtype))
    return own + new_graphs(model, UniformSteps(model, store, state, device), slots, drafts).bytes_of_all(device.taken)


def new_graphs(model: Model, steps: UniformSteps, slots: Slots, drafts: InFlightDrafts) -> Graphs[RecordedStep]:
    """Returns the set of steps to record; none is recorded yet."""
    later = [(1, RowShape.SHARED)] if may_share(model) else []
    return Graphs(slots.num, forms_of(drafts.lengths, may_branch=drafts.may_branch), steps.record, later)


def may_share(model: Model) -> bool:
    """Returns whether shared prefixes are attended to separately.

    That needs full attention (no window) and a model whose sums may depend on other rows (not `is_fixed`).
    """
    return model.has_full_attention and not model.is_fixed


def wants_only_sampling(placement: Placement) -> bool:
    """Returns whether the request uses the logits unchanged, reports nothing about them and brings nothing but ids."""
    params = placement.params
    is_restricted = params.has_banned_tokens or params.needs_tokens or params.allowed_token_ids or params.min_tokens
    has_reports = params.logprobs >= 0 or params.prompt_logprobs >= 0 or params.is_search
    is_given = placement.prompt_embeds is not None or placement.images or placement.adapter != NO_ADAPTER
    return not (is_restricted or has_reports or params.logit_bias or is_given)
