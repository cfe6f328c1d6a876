"""A runner for devices that work while the host plans: a step is launched before the one before it is collected.

A step is uniform if its rows only decode or verify drafts, and mixed if some compute parts of prompts. `UniformSteps`
computes both from recorded steps. Where rows need more than sampling (a grammar, penalties, log probabilities), only
the forward pass is recorded, and the plain `Runner` samples, which waits for the device. What brings or wants hidden
states is the plain runner's as a whole. Scheduling policy is decided elsewhere; the input is a `StepPlan`. Where other
ranks compute the same steps, they are told of each before it begins (`Followers`).
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import IN_FLIGHT, Placement, StepPlan
from sluice_server.engine.worker.device import Device
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.forward import trees_of
from sluice_server.engine.worker.graphs import Graphs, RowShape, forms_of
from sluice_server.engine.worker.launched import LaunchedStep, is_uniform
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.engine.worker.runner import CompletedStep, Runner, StepImages
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.engine.worker.steps import RecordedStep, SampledIds, StepNumbers, UniformRows, UniformSteps, own_ids

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


class Followers(Protocol):
    """Other ranks, which compute the same steps on devices of their own."""

    @property
    def sampled_ids(self) -> SampledIds | None:
        """Has the ids that this rank samples on all of them; None where there are none."""

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Tells the tokens of a slot from a position on, which the next step needs."""

    def begin(self, numbers: StepNumbers, *, is_sampled: bool) -> None:
        """Tells them to begin a step. `is_sampled`: the device samples behind it, and not the host."""

    def compute(self, plan: StepPlan) -> StepImages | None:
        """Tells them to compute a plan that cannot be recorded; returns what images give it, if that is known now."""


class NoFollowers:
    """Implements `Followers` where there are no other ranks."""

    sampled_ids = None

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Implements `Followers.note`."""

    def begin(self, numbers: StepNumbers, *, is_sampled: bool) -> None:
        """Implements `Followers.begin`."""

    def compute(self, plan: StepPlan) -> StepImages | None:
        """Implements `Followers.compute`."""
        return None


ALONE = NoFollowers()


class OverlappedRunner:
    """Runs steps with `UniformSteps` and the state on the device, and what cannot be recorded with `plain`."""

    depth = 1  # the device computes one step while the next is planned

    def __init__(  # noqa: PLR0913 # the parts of a runner
        self,
        plain: Runner,
        steps: UniformSteps,
        state: DeviceState,
        device: Device,
        graphs: Graphs[RecordedStep],
        prefixes: SharedPrefixes | None = None,
        followers: Followers = ALONE,
    ) -> None:
        self._followers = followers
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
            if not self._is_recorded(plan):
                known = self._known(plan)
                return self._plain.launch(known, self._followers.compute(known))
            self._stage(plan)
            self._num_steps += 1
            if all(map(self._is_plain.__getitem__, plan.slots)):
                return self._launch(plan)
            rows = self._rows(plan, may_share=False)
            return self._plain.launch_over(plan, lambda: self._logits(plan, rows))

    def _logits(self, plan: StepPlan, rows: UniformRows) -> Tensor:
        """Begins the forward pass of a plan; returns the logits of its sample positions."""
        numbers = self._steps.numbers(self._graphs, rows)
        self._followers.begin(numbers, is_sampled=False)
        logits = self._steps.forward(self._graphs, numbers).logits[: rows.num_sampled]
        if rows.samples is None or all(rows.samples):
            return logits
        at = np.flatnonzero(rows.samples)
        return logits[self._device.upload(at)]

    def idle(self) -> bool:
        """Records one more step; returns False when none is left. Called only while no requests wait."""
        try:
            with device_faults():
                return self._graphs.grow()
        except OutOfDeviceMemory:
            num = self._graphs.give_up() + 1
            logger.warning("no device memory to record more steps: %d sizes are computed without", num)
            return False

    def _is_recorded(self, plan: StepPlan) -> bool:
        """Returns whether the forward pass of a plan can be a recorded one."""
        if is_uniform(plan):
            return not self._plain.needs_hidden(plan)
        shape = len(plan.slots), plan.num_tokens, RowShape.MIXED, self._plain.has_adapters(plan)
        return not (plan.drafts or self._graphs.find(*shape) is None or self._plain.needs_hidden(plan))

    def _stage(self, plan: StepPlan) -> None:
        """Begins to write the tokens that the device has not written itself, and what else has changed."""
        end = 0
        is_last = all(map(self._is_plain.__getitem__, plan.slots))  # the device writes what it samples itself
        for slot, start, num, samples in zip(plan.slots, plan.starts, plan.query_lens, plan.samples, strict=True):
            end += num
            ids = plan.token_ids[end - num : end]
            if self._ahead[slot] != start or num > 1:
                assert IN_FLIGHT not in ids, f"slot {slot}: the token at {start} is on no device"
                self._state.note(slot, start, ids)
                self._followers.note(slot, start, ids)
            is_kept = is_last and samples and (num == 1 or not is_uniform(plan))
            self._ahead[slot] = start + num if is_kept else UNKNOWN
        self._state.flush()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        rows = self._rows(plan)
        order: Sequence[int] = () if rows.prefixes is None else rows.prefixes.order
        numbers = self._steps.numbers(self._graphs, rows)
        self._followers.begin(numbers, is_sampled=True)
        self._last = LaunchedStep(plan, self._steps.launch(self._graphs, numbers, rows.num_sampled), order)
        return self._last

    def _rows(self, plan: StepPlan, *, may_share: bool = True) -> UniformRows:
        """Returns the rows in the order of computation: rows that share prefixes are adjacent where that pays off."""
        slots, starts, lens = plan.slots, plan.starts, plan.query_lens
        has_adapters = self._plain.has_adapters(plan)
        if not is_uniform(plan):
            return UniformRows(slots, starts, lens, samples=plan.samples, has_adapters=has_adapters)
        found = None
        if may_share and not has_adapters and self._prefixes is not None and len(slots) > 1 and max(lens) == 1:
            found = self._prefixes.find(slots, starts)
        if found is None:
            return UniformRows(slots, starts, lens, trees_of(plan), has_adapters=has_adapters)
        return UniformRows([slots[i] for i in found.order], [starts[i] for i in found.order], lens, prefixes=found)

    def _known(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the token ids of the step in flight, after waiting for it."""
        if self._last is None or IN_FLIGHT not in plan.token_ids:
            return plan
        return plan.known(self._last.sampled())


class Recording(NamedTuple):
    """Recorded steps, and the state of slots from which they compute."""

    state: DeviceState
    steps: UniformSteps
    graphs: Graphs[RecordedStep]


def overlap(  # noqa: PLR0913 # the parts and sizes of a runner
    plain: Runner,
    model: Model,
    store: BlockStore,
    device: Device,
    slots: Slots,
    drafts: InFlightDrafts = NO_DRAFTS,
    adapters: DeviceTables | None = None,
    followers: Followers = ALONE,
) -> OverlappedRunner:
    """Builds an overlapped runner around a plain one and records the steps that every start needs.

    `adapters`: those that rows may have; steps of rows with some are recorded beside the others.
    """
    state, steps, graphs = record(model, store, device, slots, drafts, adapters, followers.sampled_ids)
    prefixes = SharedPrefixes(plain.block_tables, slots.block_size) if may_share(model) else None
    return OverlappedRunner(plain, steps, state, device, graphs, prefixes, followers)


def record(  # noqa: PLR0913 # all that is recorded
    model: Model,
    store: BlockStore,
    device: Device,
    slots: Slots,
    drafts: InFlightDrafts,
    adapters: DeviceTables | None = None,
    sampled_ids: SampledIds | None = None,
) -> Recording:
    """Records the steps that every start needs: plain decode steps, those with drafts and mixed ones.

    Steps of rows that share a prefix, and further sizes, are recorded while idle. Where ranks share sampled ids, all
    are recorded now: what one of them could not record later would end the group.
    """
    state = DeviceState(device, model.device, slots)
    state.note(0, 0, [0])  # compiles the kernels that write to rows
    state.extend(0, 0, [0])
    state.flush()
    shared = sampled_ids or own_ids
    steps = UniformSteps(model, store, state, device, most_sampled(slots, drafts), adapters, shared)
    graphs = new_graphs(model, steps, slots, drafts)
    graphs.warm()
    if sampled_ids is not None:
        graphs.finish()
    return Recording(state, steps, graphs)


def recorded_bytes(  # noqa: PLR0913 # all that is recorded
    model: Model,
    cache_dtype: torch.dtype,
    device: Device,
    slots: Slots,
    drafts: InFlightDrafts = NO_DRAFTS,
    adapters: DeviceTables | None = None,
    sampled_ids: SampledIds | None = None,
) -> int:
    """Returns the bytes that recorded steps and slot state will take on the device, beside weights and cache.

    Measured over a cache of one block, before the real cache exists. `device` must not be used afterwards: the runner
    takes another.
    """
    before = device.taken()
    state = DeviceState(device, model.device, slots)
    store = BlockStore(model.new_cache(1, slots.block_size, cache_dtype))
    shared = sampled_ids or own_ids
    steps = UniformSteps(model, store, state, device, most_sampled(slots, drafts), adapters, shared)
    own = device.taken() - before
    return own + new_graphs(model, steps, slots, drafts).bytes_of_all(device.taken)


def most_sampled(slots: Slots, drafts: InFlightDrafts) -> int:
    """Returns the tokens that a step samples at most."""
    return slots.num * (1 + max(drafts.lengths, default=0))


def new_graphs(model: Model, steps: UniformSteps, slots: Slots, drafts: InFlightDrafts) -> Graphs[RecordedStep]:
    """Returns the set of steps to record; none is recorded yet."""
    later = [(1, RowShape.SHARED)] if may_share(model) else []
    forms = forms_of(drafts.lengths, may_branch=drafts.may_branch)
    return Graphs(slots.num, forms, steps.record, later, slots.max_tokens, with_adapters=slots.adapter_slots > 0)


def may_share(model: Model) -> bool:
    """Returns whether shared prefixes are attended to separately.

    That needs full attention (no window) and a model whose sums may depend on other rows (not `is_fixed`).
    """
    return model.has_full_attention and not model.is_fixed


def wants_only_sampling(placement: Placement) -> bool:
    """Returns whether the request uses the logits unchanged and reports nothing about them."""
    params = placement.params
    is_restricted = params.has_banned_tokens or params.needs_tokens or params.allowed_token_ids or params.min_tokens
    has_reports = params.logprobs >= 0 or params.is_search
    return not (is_restricted or has_reports or params.logit_bias)
