"""The choice of a preemption's victim: least loss first, none of the current step, few preemptions of one sequence."""

import pytest

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.policies import make_policy
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.validation import RequestValidator
from sluice_server.engine.scheduler.waiting import WaitingQueue

LIMITS = Limits(context_length=64, vocab_size=50)
CACHE = KVCache(256, 4, prefix_caching=True)
DOOR = RequestValidator(CACHE, LIMITS, (7,), 8)
LENGTHS = OutputLengths()
QUEUE = WaitingQueue(make_policy(SchedulerSettings(), LENGTHS, 64), 99, 999)
LOSS = victims.Losses(SchedulerState(CACHE, QUEUE, 8), LENGTHS).of


def sequence(
    order: int, priority: int = 0, computed: int = 4, preempted: int = 0, num_output: int = 0, **fields: object
) -> Sequence:
    """A running sequence; a later arrival is further behind."""
    params = SamplingParams(max_tokens=9)
    group = DOOR.open(EngineRequest(f"{order:032x}", (1, 2, 3, 4, 5), params, priority, **fields), order)  # type: ignore[arg-type] # mixed
    group.measure = float(order)
    one = group.sequences[0]
    one.num_computed, one.num_preemptions = computed, preempted
    one.tokens += [9] * num_output
    return one


FIRST = sequence(0)


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        ([sequence(1), sequence(2)], 2),  # the youngest of equals
        ([sequence(1, computed=1), sequence(2)], 1),  # the least computed
        ([sequence(1, num_output=2), sequence(2, num_output=7)], 1),  # nearly complete ones are spared
        ([sequence(1, computed=40), sequence(2, computed=39, num_output=8)], 1),
        ([sequence(1, preempted=1, computed=1), sequence(2)], 2),  # the one preempted less often before that
        ([sequence(1, priority=-1), sequence(2, computed=1)], 1),  # the lowest priority before that
        ([sequence(1), sequence(2, preempted=2)], 1),  # spared
        ([sequence(2, preempted=2)], None),
        ([], None),
    ],
)
def test_the_least_loss_gives_way(running: list[Sequence], victim: int | None) -> None:
    found = victims.behind([FIRST, *running], FIRST, step=9, max_preemptions=2, loss=LOSS)
    assert (found.group.order if found else None) == victim


def test_who_is_ahead_or_in_the_step_stays() -> None:
    running = [sequence(1), sequence(2), sequence(3)]
    running[2].last_step = 9
    assert victims.behind(running, running[1], step=9, max_preemptions=2, loss=LOSS) is None


def test_the_longest_paused_gives_way_first_wherever_it_stands() -> None:
    paused = [sequence(number, computed=4, credit=0) for number in range(2)]
    paused[0].group.held_since_s = 5.0
    assert victims.idle([sequence(3), *paused], step=9) is paused[1]
    paused[1].last_step = 9
    assert victims.idle([sequence(3), *paused], step=9) is paused[0]
    assert victims.idle([sequence(3)], step=9) is None


def test_the_last_resort_preempts_any_sequence_the_youngest_first() -> None:
    running = [sequence(1), sequence(2, priority=9, preempted=5), FIRST]
    assert victims.last_resort(running, FIRST) is running[1]
    assert victims.last_resort([FIRST], FIRST) is None


def test_a_higher_priority_displaces_only_if_that_is_enough() -> None:
    for num_prompt, displaced in ((8, 1), (44, 0)):
        scheduler = Scheduler(KVCache(12, 4, True), LIMITS, (7,), 2, 64, SchedulerSettings(watermark=0.0))
        scheduler.add(EngineRequest("0" * 32, (1,) * 8, SamplingParams(max_tokens=9), priority=9))
        scheduler.add(EngineRequest("1" * 32, (2,) * 8, SamplingParams(max_tokens=9)))
        for _ in range(2):
            plan = scheduler.plan(0.0)
            assert plan is not None and len(plan.slots) == 2
            scheduler.apply(plan, StepResult([9, 9]), 0.0)
        scheduler.add(EngineRequest("2" * 32, (3,) * num_prompt, SamplingParams(max_tokens=3), priority=5))
        scheduler.plan(0.0)
        assert scheduler.num_preemptions == displaced
