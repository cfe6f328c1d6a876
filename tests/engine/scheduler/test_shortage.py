"""A sequence without a block waits if others will soon leave theirs, for a while, and never for a lower priority."""

import pytest

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler import shortage, victims
from sluice_server.engine.scheduler.costs import PreemptionCosts
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.settings import SchedulerSettings

EOS, WORD, SIZE, PROMPT = 7, 9, 4, 8
LIMITS = Limits(context_length=256, vocab_size=50)


class Rig:
    """A scheduler of which each request is admitted, whatever it may need later."""

    def __init__(self, num_blocks: int, priorities: tuple[int, ...], costs: PreemptionCosts | None = None) -> None:
        settings = SchedulerSettings(watermark=-9.0, costs=costs)
        self.scheduler = Scheduler(KVCache(num_blocks, SIZE, False), LIMITS, (EOS,), len(priorities), 64, settings)
        for number, priority in enumerate(priorities):
            params = SamplingParams(max_tokens=60)
            self.scheduler.add(EngineRequest(f"{number:032x}", (number,) * PROMPT, params, priority))

    def learn(self, *lengths: int) -> None:
        """Has earlier outputs have had these lengths."""
        for length in lengths:
            self.scheduler._lengths.observe("", length)

    def step(self, ends: int = -1) -> list[int]:
        """Runs a step, in which one request may end; returns the requests of its rows."""
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        of_slot = {one.slot: one.group.order for one in self.scheduler._state.running}
        rows = [of_slot[slot] for slot in plan.slots]
        self.scheduler.apply(plan, StepResult([EOS if row == ends else WORD for row in rows]), 0.0)
        return rows

    def until_short(self) -> list[int]:
        """Steps until a step has fewer rows than there are requests; returns them."""
        for _ in range(60):
            rows = self.step()
            if len(rows) < 3:
                return rows
        raise AssertionError("blocks never run short")


NUM_BLOCKS = 19  # six blocks of each of three requests, and one more
SOON = range(17, 24)  # outputs of this length end soon when blocks run short


def test_it_waits_for_outputs_that_end_soon() -> None:
    rig = Rig(NUM_BLOCKS, (0, 0, 0))
    rig.learn(*SOON)
    assert rig.until_short() == [0]
    assert rig.scheduler.num_preemptions == 0
    rig.step(ends=0)
    assert sorted(rig.step()) == [1, 2], "the blocks of the one that ended are enough"
    assert rig.scheduler.num_preemptions == 0 == rig.scheduler.num_recomputed


def test_it_preempts_when_no_output_will_end_soon() -> None:
    rig = Rig(NUM_BLOCKS, (0, 0, 0))
    rig.learn(*[58] * 9)
    assert rig.until_short() == [0, 1]
    assert rig.scheduler.num_preemptions == 1


def test_it_does_not_wait_for_a_lower_priority() -> None:
    rig = Rig(NUM_BLOCKS, (5, 5, 0))
    rig.learn(*SOON)
    assert rig.until_short() == [0, 1]
    assert rig.scheduler.num_preemptions == 1


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "MOST_WAITS", 2)
    rig = Rig(NUM_BLOCKS, (0, 0, 0))
    rig.learn(*SOON)
    assert [rig.until_short(), rig.step(), rig.step()] == [[0], [0], [0, 1]]
    assert rig.scheduler.num_preemptions == 1


def test_it_does_not_wait_if_nothing_goes_on() -> None:
    rig = Rig(NUM_BLOCKS - 1, (0, 0, 0))  # none of the three gets a block
    rig.learn(*SOON)
    assert rig.until_short()
    assert rig.scheduler.num_preemptions == 1
    assert rig.scheduler.num_last_resorts == 0


def test_others_go_on_in_place_of_those_that_wait() -> None:
    """Of more sequences than a step has tokens, those that waited are the least recently served."""
    rig = Rig(NUM_BLOCKS, (0, 0, 0))
    rig.learn(*SOON)
    assert rig.until_short() == [0]
    rig.scheduler.take_share(2 / 64)
    assert rig.step() == [0]
    assert rig.scheduler.num_preemptions == 0 == rig.scheduler.num_last_resorts


def test_a_victim_that_is_cheaply_moved_is_hardly_waited_for() -> None:
    assert PreemptionCosts(1, 1e9, 1.0).tokens_lost(10, 100) == pytest.approx(2e-8)
    assert PreemptionCosts(1, 1.0, 1e9).tokens_lost(10, 100) == 100
    rig = Rig(NUM_BLOCKS, (0, 0, 0), costs=PreemptionCosts(1, 1e9, 1.0))
    rig.learn(*SOON)
    assert rig.until_short() == [0, 1]
    assert rig.scheduler.num_preemptions == 1


def test_what_a_victim_loses_is_found_anew_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    of, found = victims.Losses.of, list[tuple[int, int]]()

    def counted(self: victims.Losses, sequence: Sequence) -> victims.Loss:
        found.append((rig.scheduler._planner.step, sequence.group.order))
        return of(self, sequence)

    monkeypatch.setattr(victims.Losses, "of", counted)
    rig = Rig(NUM_BLOCKS, (0, 0, 0))
    rig.learn(*SOON)
    rig.until_short()
    for _ in range(2):
        rig.step()
    steps = [{step for step, one in found if one == order} for order in range(3)]
    assert max(map(len, steps)) > 1, "a loss of an earlier step is taken"
