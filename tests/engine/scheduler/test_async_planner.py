"""Steps that are planned before the last one is applied: which are planned, and what happens to discarded rows."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import IN_FLIGHT, StepPlan, StepResult, VerifiedDrafts
from sluice_server.engine.request import EngineRequest, FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings

EOS = 9


def make(num_slots: int = 4, num_blocks: int = 32, **settings: Any) -> Scheduler:  # noqa: ANN401 # of settings' types
    return Scheduler(KVCache(num_blocks, 4, True), Limits(64, 50), (EOS,), num_slots, 64, SchedulerSettings(**settings))


def add(scheduler: Scheduler, name: str, num_prompt: int = 3, credit: int | None = None, **params: Any) -> None:  # noqa: ANN401 # of SamplingParams' types
    options = {"max_tokens": 8, "temperature": 0.0, **params}
    scheduler.add(EngineRequest(name, tuple(range(1, num_prompt + 1)), SamplingParams(**options), credit=credit))


def begun(scheduler: Scheduler) -> StepPlan:
    """A decode step in flight after a computed prompt."""
    apply(scheduler, planned(scheduler), 1)
    return planned(scheduler)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def apply(scheduler: Scheduler, plan: StepPlan, token: int) -> list[tuple[int, ...]]:
    return [event.token_ids for event in scheduler.apply(plan, StepResult([token] * len(plan.slots)), 0.0)[0]]


def test_the_next_token_is_computed_after_one_that_is_still_on_the_device() -> None:
    scheduler = make()
    add(scheduler, "a")
    first = begun(scheduler)
    second = scheduler.plan_ahead(0.0)
    assert second is not None
    assert (first.starts, first.token_ids) == ([3], [1])
    assert (second.starts, second.token_ids, second.samples) == ([4], [IN_FLIGHT], [True])
    assert second.new_blocks == [(second.slots[0], 1, second.new_blocks[0].blocks, 0)]  # the fifth token's
    assert apply(scheduler, first, 2) == [(2,)] and apply(scheduler, second, 3) == [(3,)]
    scheduler.check()


def test_a_row_behind_an_end_is_passed_over() -> None:
    scheduler = make()
    add(scheduler, "a")
    first = begun(scheduler)
    second = scheduler.plan_ahead(0.0)
    assert second is not None
    (event,), _ = scheduler.apply(first, StepResult([EOS]), 0.0)
    assert event.finish is FinishReason.EOS
    assert apply(scheduler, second, 3) == [] and not scheduler.has_work
    assert scheduler.cache.pool.num_held == 0


def test_nothing_is_computed_behind_the_last_token() -> None:
    scheduler = make()
    add(scheduler, "a", max_tokens=2)
    first = begun(scheduler)
    assert scheduler.plan_ahead(0.0) is None
    assert scheduler.apply(first, StepResult([2]), 0.0)[0][0].finish is FinishReason.LENGTH


@pytest.mark.parametrize("params", [{"presence_penalty": 0.5}, {"grammar": "g"}, {"best_of": 2}], ids=str)
def test_rows_that_depend_on_the_last_token_wait_for_it(params: dict[str, Any]) -> None:
    scheduler = make()
    add(scheduler, "a")
    add(scheduler, "b", **params)
    begun(scheduler)
    assert scheduler.plan_ahead(0.0) is None


def test_a_newcomer_and_a_changed_row_wait() -> None:
    disturbances: list[Callable[[Scheduler], None]] = [
        lambda one: add(one, "b"),
        lambda one: one.update("a", 7, None, None),
    ]
    for disturb in disturbances:
        scheduler = make()
        add(scheduler, "a")
        first = begun(scheduler)
        disturb(scheduler)
        assert scheduler.plan_ahead(0.0) is None
        apply(scheduler, first, 2)
        assert scheduler.plan(0.0) is not None


def test_without_blocks_nothing_is_taken_and_it_waits() -> None:
    scheduler = make(num_blocks=1)
    add(scheduler, "a", num_prompt=2, max_tokens=2)
    first = begun(scheduler)
    add(scheduler, "b", num_prompt=1, max_tokens=1)
    assert scheduler.plan_ahead(0.0) is None and scheduler.cache.pool.num_held == 1
    apply(scheduler, first, 2)
    scheduler.check()


def test_drafting_waits_for_the_step_before_unless_no_draft_is_worth_it() -> None:
    scheduler = make(max_draft_tokens=2)
    add(scheduler, "a", max_tokens=20)
    plan = begun(scheduler)
    assert scheduler.plan_ahead(0.0) is None
    apply(scheduler, plan, 2)
    scheduler._drafts.num_resting = 2
    planned(scheduler)
    assert scheduler.plan_ahead(0.0) is not None
    assert scheduler.plan_ahead(0.0) is not None
    assert scheduler.plan_ahead(0.0) is None


def test_credit_goes_to_as_many_rows_as_there_is_and_comes_back_from_those_in_vain() -> None:
    scheduler = make()
    add(scheduler, "a", n=2, credit=5)
    apply(scheduler, planned(scheduler), 1)  # the prompt but its last token
    apply(scheduler, planned(scheduler), 1)  # two tokens
    first = planned(scheduler)
    second = scheduler.plan_ahead(0.0)
    assert second is not None and len(first.slots) == 2 and len(second.slots) == 1
    assert scheduler.plan_ahead(0.0) is None
    scheduler.cancel_output("a", scheduler._state.running[0].index, 0.0)
    apply(scheduler, first, 2)
    apply(scheduler, second, 3)
    left = scheduler._state.groups["a"].credit
    assert left == 5 - 2 - 1  # two tokens each had before, and one that the other got since


def ahead(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan_ahead(0.0)
    assert plan is not None
    return plan


def test_a_step_follows_from_the_one_before_and_leaves_its_plan_as_it_was() -> None:
    scheduler = make()
    for name in ("a", "b"):
        add(scheduler, name, num_prompt=3, max_tokens=20)
    plans = [begun(scheduler)]
    blocks = []
    for _ in range(6):
        plans.append(ahead(scheduler))
        apply(scheduler, plans.pop(0), 1)
        blocks.append([(run.slot, run.first) for run in plans[0].new_blocks])
    assert plans[0].starts == [9, 9] and plans[0].token_ids == [IN_FLIGHT] * 2
    slots = plans[0].slots
    assert blocks == [[(one, 1) for one in slots], [], [], [], [(one, 2) for one in slots], []]
    scheduler.check()
    last = scheduler._planner.rows
    ahead(scheduler)
    assert plans[0].starts == [9, 9] and scheduler._planner.rows is last  # as the rows are kept


def test_a_row_whose_output_is_complete_is_left_out_of_those_that_follow() -> None:
    scheduler = make()
    add(scheduler, "a", max_tokens=20)
    add(scheduler, "b", max_tokens=4)
    first = begun(scheduler)
    second, third = ahead(scheduler), ahead(scheduler)
    fourth = ahead(scheduler)
    assert [len(one.slots) for one in (first, second, third, fourth)] == [2, 2, 2, 1]


def test_a_row_that_has_ended_is_left_out_of_those_that_follow() -> None:
    scheduler = make()
    add(scheduler, "a", max_tokens=20)
    add(scheduler, "b", max_tokens=20)
    first, second = begun(scheduler), ahead(scheduler)
    scheduler.apply(first, StepResult([EOS, 1]), 0.0)
    assert ahead(scheduler).slots == second.slots[1:]


def test_behind_drafts_in_flight_no_step_follows_without_their_row() -> None:
    """The row whose drafts are verified is left out of one step, and not of those behind it."""
    scheduler = make(max_draft_tokens=2)
    add(scheduler, "a", max_tokens=20)
    add(scheduler, "b", max_tokens=20)
    plan = begun(scheduler)
    apply(scheduler, plan, 1)
    asks = scheduler.asks()
    scheduler.offer(asks, [[5, 5], []], 0.0)
    verifying = planned(scheduler)
    assert verifying.drafts == {1: 2}
    scheduler._drafts.num_resting = 4
    beside = ahead(scheduler)
    assert len(beside.slots) == 1
    runs = {1: VerifiedDrafts((5, 5, 1))}
    scheduler.apply(verifying, StepResult([1, 5], runs=runs), 0.0)
    assert len(ahead(scheduler).slots) == 2
    apply(scheduler, beside, 1)
