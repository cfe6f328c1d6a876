"""The scheduler, case by case."""

import dataclasses

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import AdapterRef, EngineRequest, FinishReason, Limits, Pooling, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.validation import salt_of

LIMITS = Limits(context_length=64, vocab_size=50)


def make(num_blocks: int = 40, max_num_seqs: int = 8, budget: int = 16, **settings: int) -> Scheduler:
    cache, chosen = KVCache(num_blocks, 4, prefix_caching=True), SchedulerSettings(**settings)  # type: ignore[arg-type]
    return Scheduler(cache, LIMITS, (7,), max_num_seqs, budget, chosen)


def request(number: int, num_prompt: int = 5, priority: int = 0, **params: object) -> EngineRequest:
    options = SamplingParams(**{"max_tokens": 5, **params})  # type: ignore[arg-type] # mixed values
    prompt = tuple((number * 7 + i) % 50 for i in range(num_prompt))
    return EngineRequest(f"{number:032x}", prompt, options, priority)


def run_all(scheduler: Scheduler, token: int = 9) -> dict[str, list[FinishReason]]:
    """Runs steps until all requests have ended, sampling `token` each time. Returns how each request finished."""
    ends: dict[str, list[FinishReason]] = {}
    while (plan := scheduler.plan(0.0)) is not None:
        events, _ = scheduler.apply(plan, StepResult([token] * len(plan.slots)), 0.0)
        for event in events:
            if event.finish is not None:
                ends.setdefault(event.request_id, []).append(event.finish)
        scheduler.check()
    return ends


def test_a_budget_smaller_than_the_batch_starves_no_sequence() -> None:
    scheduler = make(max_num_seqs=32, num_blocks=200, budget=7)
    for number in range(32):
        scheduler.add(request(number, num_prompt=1, max_tokens=3))
    assert len(run_all(scheduler)) == 32


def test_higher_priority_gets_blocks_first_and_the_lower_one_comes_back() -> None:
    scheduler = make(num_blocks=5, budget=64)
    scheduler.add(request(1, num_prompt=10, max_tokens=6))
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.apply(first, StepResult([9]), 0.0)
    scheduler.add(request(2, num_prompt=2, priority=5, max_tokens=14))
    ends = run_all(scheduler)
    assert list(ends) == [f"{2:032x}", f"{1:032x}"]
    assert scheduler.num_preemptions > 0


def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ServiceError, match="need 8 cache blocks; this server has 4") as caught:
        make(num_blocks=4).add(request(1, num_prompt=10, max_tokens=20))
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_the_engine_checks_again_what_the_door_checked() -> None:
    for bad in (
        request(1, num_prompt=0),
        request(1, temperature=float("nan")),
        request(1, num_prompt=60, max_tokens=5),
        request(1, stop_token_ids=(50,)),
        request(1, priority=10_000),
    ):
        with pytest.raises(ServiceError) as caught:
            make().add(bad)
        assert caught.value.code is Code.INVALID_ARGUMENT


def test_finish_reasons() -> None:
    scheduler = make()
    scheduler.add(request(1))
    assert run_all(scheduler, token=7) == {f"{1:032x}": [FinishReason.EOS]}
    scheduler.add(request(2, stop_token_ids=(9,)))
    assert run_all(scheduler) == {f"{2:032x}": [FinishReason.STOP_TOKEN]}
    scheduler.add(request(3, ignore_eos=True))
    assert run_all(scheduler, token=7) == {f"{3:032x}": [FinishReason.LENGTH]}


def test_cancel_frees_at_once_in_every_state() -> None:
    scheduler = make(max_num_seqs=1)
    for number in (1, 2):
        scheduler.add(request(number))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.cancel(f"{1:032x}")  # running, its step in flight
    assert scheduler.cancel(f"{2:032x}")  # waiting
    assert not scheduler.cancel(f"{1:032x}")
    assert scheduler.apply(plan, StepResult([9]), 0.0) == ([], [])
    assert scheduler.cache.pool.num_held == 0


def test_an_adapter_is_refused_and_not_answered_by_the_base() -> None:
    scheduler = make()
    with pytest.raises(ServiceError, match="not started with --max-adapters") as caught:
        scheduler.add(dataclasses.replace(request(1), adapter=AdapterRef(b"a" * 32, "a", 1)))
    assert caught.value.code is Code.UNIMPLEMENTED
    assert scheduler.num_open == 0


def test_blocks_of_adapters_and_of_the_base_have_names_of_their_own() -> None:
    base = request(1)
    adapters = [None, AdapterRef(b"a" * 32, "a", 1), AdapterRef(b"b" * 32, "a", 1)]
    assert len({salt_of(dataclasses.replace(base, adapter=one)) for one in adapters}) == len(adapters)
    assert salt_of(base) == base.cache_salt


def lengths_beside_a_stream(scheduler: Scheduler, num_steps: int) -> list[list[int]]:
    """Tokens of each row of the steps that follow a flood of texts for vectors, of 5 tokens each, beside one stream."""
    found = []
    for number in range(1, 12):
        scheduler.add(dataclasses.replace(request(number), pooling=Pooling.LAST))
    for _ in range(num_steps):
        plan = scheduler.plan(0.0)
        assert plan is not None
        found.append(plan.query_lens)
        results = StepResult([9] * len(plan.slots), pooled={i: b"" for i, ends in plan.pools.items() if ends})
        scheduler.apply(plan, results, 0.0)
        scheduler.check()
    return found


def test_texts_for_vectors_have_a_bounded_part_of_a_step_that_decodes() -> None:
    scheduler = make(max_pooling_tokens=3)
    scheduler.add(request(0, max_tokens=30))
    assert scheduler.apply(scheduler.plan(0.0), StepResult([9]), 0.0)  # type: ignore[arg-type] # there is one
    lengths = lengths_beside_a_stream(scheduler, 4)
    assert [sum(one) for one in lengths] == [4, 3, 4, 3] and all(one[0] == 1 for one in lengths)
    assert len(scheduler._state.running) <= 3  # a flood takes no slots that it cannot use
    scheduler.cancel(f"{0:032x}")
    alone = scheduler.plan(0.0)
    assert alone is not None and sum(alone.query_lens) > 4  # without a stream the whole budget is theirs


def test_what_another_engine_had_is_computed_in_parts_and_keeps_nobody_waiting() -> None:
    scheduler = make()
    scheduler.add(request(1, num_prompt=2))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(plan, StepResult([9]), 0.0)
    for number in (2, 3, 4):  # 12 tokens each
        received = ((1, 2, 3, 4),)
        scheduler.add(dataclasses.replace(request(number, num_prompt=8), resume_ids=received))
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.query_lens == [1, 11]  # three quarters for three of four
    scheduler.apply(plan, StepResult([9] * 2), 0.0)
    scheduler.add(request(5))
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.query_lens == [1, 1, 7, 5]  # half of what decodes leave
