"""A runner for devices that work while the host plans: a step is launched before the one before it is collected.

A step is uniform if its rows only decode or verify drafts, and mixed if some compute parts of prompts. `UniformSteps`
computes both from recorded steps. Where rows need more than sampling (a grammar, penalties, log probabilities), only
the forward pass is recorded, and the plain `Runner` samples, which waits for the device. What brings or wants hidden
states is the plain runner's as a whole. Scheduling policy is decided elsewhere; the input is a `StepPlan`. Where other
ranks compute the same steps, they are told of each before it begins (`Followers`).
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from sluice_server.engine.errors import OutOfDeviceMemory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import IN_FLIGHT, StepPlan
from sluice_server.engine.worker.device import Device
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.followers import ALONE, Followers
from sluice_server.engine.worker.forward import trees_of
from sluice_server.engine.worker.graphs import Graphs, RowShape
from sluice_server.engine.worker.launched import LaunchedStep, is_uniform
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.engine.worker.recorded_steps import NO_DRAFTS, InFlightDrafts, may_share, record
from sluice_server.engine.worker.runner import CompletedStep, Runner
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.engine.worker.staging import StagedTokens
from sluice_server.engine.worker.step_numbers import UniformRows, numbers_of_step
from sluice_server.engine.worker.steps import RecordedStep, UniformSteps

logger = logging.getLogger(__name__)


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
        self._tokens = StagedTokens(state, followers)
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
            self._tokens.place(placement)
            self._state.place(placement)
        if plan.placements and self._prefixes is not None:
            self._prefixes.forget()
        for run in plan.new_blocks:
            self._state.extend(run.slot, run.first, run.blocks)

    def launch(self, plan: StepPlan) -> "LaunchedStep | CompletedStep":
        """Begins a step; it may be launched before the one before it is collected."""
        with device_faults():
            self._device.join()
            has_adapters, is_mixed = self._plain.has_adapters(plan), not is_uniform(plan)
            if not self._is_recorded(plan, has_adapters=has_adapters, is_mixed=is_mixed):
                known = self._known(plan)
                return self._plain.launch(known, self._followers.compute(known))
            rows = _rows(plan, has_adapters=has_adapters, is_mixed=is_mixed)
            is_sampled = self._tokens.are_plain(rows.slots)  # the device samples itself, and not the host
            self._tokens.stage(plan, rows, is_sampled=is_sampled)
            self._num_steps += 1
            if is_sampled:
                return self._launch(plan, rows)
            return self._plain.launch_over(plan, lambda: self._logits(rows))

    def _logits(self, rows: UniformRows) -> Tensor:
        """Begins the forward pass of a step; returns the logits of its sample positions."""
        numbers = numbers_of_step(self._graphs, rows)
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

    def _is_recorded(self, plan: StepPlan, *, has_adapters: bool, is_mixed: bool) -> bool:
        """Returns whether the forward pass of a plan can be a recorded one."""
        if not is_mixed:
            return not self._plain.needs_hidden(plan)
        shape = len(plan.slots), plan.num_tokens, RowShape.MIXED, has_adapters
        return not (plan.drafts or self._graphs.find(*shape) is None or self._plain.needs_hidden(plan))

    def _launch(self, plan: StepPlan, rows: UniformRows) -> LaunchedStep:
        rows = self._beside_sharers(plan, rows)
        order: Sequence[int] = () if rows.prefixes is None else rows.prefixes.order
        numbers = numbers_of_step(self._graphs, rows)
        self._followers.begin(numbers, is_sampled=True)
        self._last = LaunchedStep(plan, self._steps.launch(self._graphs, numbers, rows.num_sampled), order)
        return self._last

    def _beside_sharers(self, plan: StepPlan, rows: UniformRows) -> UniformRows:
        """Returns the rows in the order of computation: those that share prefixes are adjacent where that pays off."""
        may_share = rows.samples is None and not rows.has_adapters and plan.num_tokens == len(plan.slots) > 1
        if not may_share or self._prefixes is None:
            return rows
        found = self._prefixes.find(plan.slots, plan.starts)
        if found is None:
            return rows
        return UniformRows(rows.slots[found.order], rows.starts[found.order], rows.lens, prefixes=found)

    def _known(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the token ids of the step in flight, after waiting for it."""
        if self._last is None or IN_FLIGHT not in plan.token_ids:
            return plan
        return plan.known(self._last.sampled())


def _rows(plan: StepPlan, *, has_adapters: bool, is_mixed: bool) -> UniformRows:
    """Returns the rows of a plan in its order."""
    slots, starts = np.array(plan.slots, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
    if plan.num_tokens == len(slots):
        lens = np.ones(len(slots), dtype=np.int64)
    else:
        lens = np.array(plan.query_lens, dtype=np.int64)
    if is_mixed:
        return UniformRows(slots, starts, lens, samples=plan.samples, has_adapters=has_adapters)
    return UniformRows(slots, starts, lens, trees_of(plan), has_adapters=has_adapters)


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
