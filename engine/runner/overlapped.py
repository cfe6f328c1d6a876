"""A runner for a device that works while the host plans: steps are launched before the one before them is collected.

Steps whose rows all decode or verify drafts, and want nothing but sampling, go to `UniformSteps`; others to
the plain `Runner`, which waits for the device. Knows no policy.
"""

import itertools
from collections.abc import Callable

from torch import Tensor

from engine.cache.tiers import Move
from engine.models.model import Model
from engine.plan import IN_FLIGHT, Placement, Plan, Run, StepResult, num_accepted
from engine.runner.device import Arrival, Device
from engine.runner.faults import device_faults
from engine.runner.graphs import Graphs
from engine.runner.runner import Done, Runner
from engine.runner.state import DeviceState, Slots
from engine.runner.steps import BAD, Recorded, UniformSteps

UNKNOWN = -1  # the device has no token of the slot that nobody told it


class Launched:
    """A step that the device is computing."""

    is_done = False

    def __init__(self, plan: Plan, arrival: Arrival) -> None:
        self._plan = plan
        self._arrival = arrival
        self._result: StepResult | None = None

    def collect(self) -> StepResult:
        """Wait for the device and return the sampled tokens."""
        if self._result is None:
            ids, ends = self._arrival.wait().tolist(), itertools.accumulate(self._plan.query_lens)
            rows = [ids[end - num : end] for end, num in zip(ends, self._plan.query_lens, strict=True)]
            self._result = result_of(self._plan, rows)
        return self._result

    def sampled(self) -> dict[int, int]:
        """What each slot sampled first."""
        return dict(zip(self._plan.slots, self.collect().token_ids, strict=True))


def result_of(plan: Plan, rows: list[list[int]]) -> StepResult:
    """The result of a uniform step whose rows sampled these ids. Behind a wrong draft nothing counts."""
    failed, runs, end = set(), {}, 0
    for i, ids in enumerate(rows):
        end += len(ids)
        drafts = plan.drafted(i, end)
        if BAD in ids[: 1 + num_accepted(drafts, ids)]:
            failed.add(i)
        elif drafts:
            runs[i] = Run(tuple(ids))
    return StepResult([ids[0] for ids in rows], frozenset(failed), runs=runs)


class OverlappedRunner:
    """`plain` with the uniform steps of `state` before it."""

    depth = 1  # the device computes one while the next is planned

    def __init__(
        self, plain: Runner, steps: UniformSteps, state: DeviceState, device: Device, graphs: Graphs[Recorded]
    ) -> None:
        self._plain = plain
        self._steps = steps
        self._state = state
        self._device = device
        self._graphs = graphs
        num_slots = len(state.tokens)
        self._is_plain = [False] * num_slots  # whether the slot wants nothing but sampling
        self._ahead = [UNKNOWN] * num_slots  # position of the token that the device has written itself
        self._last: Launched | None = None
        self._num_steps = 0

    @property
    def progress(self) -> int:
        """Layers and recorded steps computed since start."""
        return self._plain.progress + self._num_steps

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Have `on_layer` called after each layer that is computed one by one."""
        self._plain.watch(on_layer)

    def move(self, moves: list[Move]) -> None:
        """Carry out transfers on a queue of their own, behind the steps begun before."""
        with self._device.aside():
            self._plain.move(moves)

    def moved(self) -> list[tuple[Move, bool]]:
        """Transfers with the disk that have ended since the last call, and whether well."""
        return self._plain.moved()

    def place(self, plan: Plan) -> None:
        """Reset newly taken slots, then note the blocks that tables have grown by."""
        self._plain.place(plan)
        for placement in plan.placements:
            self._is_plain[placement.slot] = wants_only_sampling(placement)
            self._ahead[placement.slot] = UNKNOWN
            self._state.place(placement)
        for slot, first, blocks in plan.new_blocks:
            self._state.extend(slot, first, blocks)

    def launch(self, plan: Plan) -> "Launched | Done":
        """Begin a step; it may be launched before the one before it is collected."""
        with device_faults():
            self._device.join()
            if not self._is_uniform(plan):
                return self._plain.launch(self._known(plan))
            return self._launch(plan)

    def idle(self) -> bool:
        """Prepare for steps to come; False when there is nothing left to prepare. Never while requests wait."""
        return self._graphs.grow()

    def _is_uniform(self, plan: Plan) -> bool:
        """Whether every row samples behind each of its tokens and wants nothing else."""
        drafts = plan.drafts
        if plan.parents:
            return False
        return all(
            samples and self._is_plain[slot] and drafts.get(i, 0) == length - 1
            for i, (slot, length, samples) in enumerate(zip(plan.slots, plan.query_lens, plan.samples, strict=True))
        )

    def _launch(self, plan: Plan) -> Launched:
        end = 0
        for slot, start, num in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            end += num
            ids = plan.token_ids[end - num : end]
            if self._ahead[slot] != start or num > 1:
                assert IN_FLIGHT not in ids, f"slot {slot}: the token at {start} is on no device"
                self._state.note(slot, start, ids)
            self._ahead[slot] = start + 1 if num == 1 else UNKNOWN
        self._state.flush()
        self._last = Launched(plan, self._steps.launch(self._graphs, plan.slots, plan.starts, plan.query_lens))
        self._num_steps += 1
        return self._last

    def _known(self, plan: Plan) -> Plan:
        """The plan with the ids of what is in flight, which is waited for."""
        if self._last is None or IN_FLIGHT not in plan.token_ids:
            return plan
        return plan.known(self._last.sampled())


def overlap(
    plain: Runner, model: Model, cache: list[Tensor], device: Device, slots: Slots, drafts: tuple[int, ...] = ()
) -> OverlappedRunner:
    """Put the uniform steps of a device before a plain runner, and record those that every start needs: plain decode,
    and those with one of `drafts` drafted tokens a row."""
    state = DeviceState(device, model.device, slots)
    steps = UniformSteps(model, cache, state, device)
    graphs = Graphs(slots.num, (1, *(1 + num for num in drafts)), steps.record)
    graphs.warm()
    return OverlappedRunner(plain, steps, state, device, graphs)


def wants_only_sampling(placement: Placement) -> bool:
    """Whether logits are used as they are, and nothing is reported of them."""
    params = placement.params
    is_restricted = params.has_bars or params.needs_tokens or params.allowed_token_ids or params.min_tokens
    has_reports = params.logprobs >= 0 or params.prompt_logprobs >= 0 or params.is_search
    return not (is_restricted or has_reports or params.logit_bias)
