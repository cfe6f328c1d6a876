"""Requests that change while they are open: credit, appended prompt, updates, single outputs cancelled, resume."""

import math
from collections.abc import Callable

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import EngineRequest, FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import SequenceStatus
from sluice_server.engine.scheduler.settings import SchedulerSettings

LIMITS = Limits(context_length=64, vocab_size=50)
ID, OTHER = "1" * 32, "2" * 32


class Rig:
    """A scheduler, its clock, and a device that samples 9."""

    def __init__(self, num_blocks: int = 40, num_seqs: int = 8, **settings: float) -> None:
        cache = KVCache(num_blocks, 4, prefix_caching=True)
        self.scheduler = Scheduler(cache, LIMITS, (7,), num_seqs, 16, SchedulerSettings(**settings))  # type: ignore[arg-type] # mixed
        self.now = 0.0

    def add(self, request_id: str = ID, num_prompt: int = 6, **fields: object) -> None:
        params = SamplingParams(max_tokens=fields.pop("max_tokens", 5), n=fields.pop("n", 1))  # type: ignore[arg-type] # mixed
        self.scheduler.add(EngineRequest(request_id, tuple(range(10, 10 + num_prompt)), params, **fields))  # type: ignore[arg-type] # mixed

    def step(self) -> list[Sampled]:
        self.now += 1
        events, failures = self.scheduler.expire(self.now)
        assert not failures
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            events += self.scheduler.apply(plan, StepResult([9] * len(plan.slots)), self.now)[0]
        self.scheduler.check()
        return events

    def run(self) -> list[Sampled]:
        events = self.step()
        while self.scheduler.has_work:
            events += self.step()
        return events


def test_a_request_without_credit_is_prefilled_and_waits() -> None:
    rig = Rig()
    rig.add(credit=0)
    assert rig.run() == [] and rig.scheduler.num_running == 1
    rig.scheduler.grant(ID, 2, rig.now)
    assert len(rig.run()) == 2
    rig.scheduler.grant(ID, 10, rig.now)
    assert [event.finish for event in rig.run()] == [None, None, FinishReason.LENGTH]
    assert rig.scheduler.num_open == 0


def test_outputs_share_the_credit_of_their_request() -> None:
    rig = Rig()
    rig.add(n=3, credit=4)
    assert len(rig.run()) == 4
    rig.scheduler.grant(ID, 100, rig.now)
    assert len(rig.run()) == 3 * 5 - 4


def test_a_pause_keeps_its_blocks_for_a_while_then_gives_them_back_and_resumes_alike() -> None:
    rig = Rig(pause_hold_s=5.0)
    rig.add(credit=2)
    rig.run()
    assert rig.scheduler.cache.pool.num_held > 0
    for _ in range(6):
        rig.step()
    assert rig.scheduler.cache.pool.num_held == 0 and rig.scheduler.num_running == 0 and not rig.scheduler.has_work
    rig.scheduler.grant(ID, 9, rig.now)
    assert [event.first_index for event in rig.run()] == [2, 3, 4]


def test_a_paused_request_is_preempted_at_once_for_another() -> None:
    rig = Rig(num_blocks=3, pause_hold_s=1000.0)
    rig.add(credit=1)
    rig.run()
    rig.add(OTHER)
    assert {event.request_id for event in rig.run()} == {OTHER}
    slots = Rig(num_seqs=1, pause_hold_s=1000.0)
    slots.add(credit=1)
    slots.run()
    slots.add(OTHER)
    assert {event.request_id for event in slots.run()} == {OTHER}


def test_appended_prompt_is_prefilled_and_sampled_after_only_when_closed() -> None:
    rig = Rig()
    rig.add(is_open=True)
    assert rig.run() == []
    rig.scheduler.append(ID, [20, 21, 22], rig.now)
    assert rig.run() == []
    rig.scheduler.close_input(ID, rig.now)
    events = rig.run()
    assert len(events) == 5 and events[0].admission is not None and events[0].admission.num_prompt == 9
    rig.add(OTHER, is_open=True, n=2)
    rig.run()
    rig.scheduler.append(OTHER, [20], rig.now)
    rig.scheduler.close_input(OTHER, rig.now)
    assert len(rig.run()) == 10


def test_what_may_not_be_appended_leaves_the_request_as_it_was() -> None:
    rig = Rig()
    rig.add(is_open=True)
    with pytest.raises(ServiceError, match="prompt has 66 tokens; this model allows 64 minus the 5"):
        rig.scheduler.append(ID, [1] * 60, rig.now)
    with pytest.raises(ServiceError, match=r"append\[1\]: 50 is not in"):
        rig.scheduler.append(ID, [1, 50], rig.now)
    rig.scheduler.close_input(ID, rig.now)
    with pytest.raises(ServiceError, match="closed") as caught:
        rig.scheduler.append(ID, [1], rig.now)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert len(rig.run()) == 5


def test_an_update_ends_what_is_longer_and_orders_anew() -> None:
    rig = Rig()
    rig.add()
    for _ in range(3):
        rig.step()
    rig.scheduler.update(ID, 2, None, None)
    events = rig.run()
    assert [(event.token_ids, event.finish, event.is_last) for event in events] == [((), FinishReason.LENGTH, True)]
    one = Rig(num_seqs=1)
    one.add("3" * 32, max_tokens=9)
    one.step()
    one.add()
    one.add(OTHER)
    one.scheduler.update(OTHER, None, 9, None)
    assert [event.request_id for event in one.run() if event.is_last] == [OTHER, "3" * 32, ID]


def test_an_update_that_exceeds_the_context_changes_nothing() -> None:
    """The limit that was asked for at first fits, the new one does not; there is room in the cache for both."""
    rig = Rig(num_blocks=400)
    rig.add(max_tokens=5)
    with pytest.raises(ServiceError) as caught:
        rig.scheduler.update(ID, 60, None, None)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert sum(len(event.token_ids) for event in rig.run()) == 5


def test_an_updated_deadline_counts() -> None:
    rig = Rig()
    rig.add(max_tokens=40)
    rig.scheduler.update(ID, None, None, 3.0)
    assert rig.scheduler.expire(2.0) == ([], [])
    assert [request_id for request_id, _ in rig.scheduler.expire(3.0)[1]] == [ID]


def test_one_output_is_cancelled_and_the_others_go_on() -> None:
    rig = Rig()
    rig.add(n=3)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.cancel_output(ID, 1, rig.now)
    assert not rig.scheduler.cancel_output(ID, 1, rig.now)
    events = rig.run()
    assert [event.finish for event in events if event.output_index == 1] == [FinishReason.CANCELLED]
    ends = {event.output_index: event.finish for event in events if event.finish}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.CANCELLED, 2: FinishReason.LENGTH}
    assert sum(event.is_last for event in events) == 1


def test_the_first_output_may_be_cancelled_while_it_computes_the_prompt_for_all() -> None:
    rig = Rig()
    rig.add(n=3, num_prompt=40)
    rig.step()
    assert rig.scheduler.cancel_output(ID, 0, rig.now)
    events = rig.run()
    assert {event.output_index for event in events if event.token_ids} == {1, 2}
    for index in (0, 1):
        rig.add(OTHER if index else ID, n=2)
        rig.scheduler.cancel_output(OTHER if index else ID, 0, rig.now)
        rig.scheduler.cancel_output(OTHER if index else ID, 1, rig.now)
    assert [event.is_last for event in rig.run()] == [False, True] * 2
    assert rig.scheduler.num_open == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"credit": -1}, "credit: -1 is not in"),
        ({"ttft_target_s": 0.0}, "ttft_target: 0.0 s is not above 0"),
        ({"deadline_s": math.nan}, "deadline: is not a number"),
        ({"n": 0}, "n: 0 is not in"),
        ({"n": 9}, "ask for 9 sequences at once; this server runs 8"),
        ({"resume_ids": ((1,), (2,))}, "names 2 outputs, of which one at least goes on; the request has 1"),
        ({"resume_ids": (None,)}, "names 1 outputs"),
        ({"resume_ids": ((50,),)}, r"resume.outputs\[0\].token_ids\[0\]: 50 is not in"),
        ({"resume_ids": ((1,) * 6,)}, "has 6 ids; max_tokens is 5"),
        ({"resume_ids": ((1,),), "is_open": True}, "nothing can have been received while the input is open"),
        ({"n": 7, "num_prompt": 40, "max_tokens": 24}, "need 58 cache blocks; this server has 40"),
    ],
)
def test_bad_fields_are_refused_before_anything_is_queued(fields: dict[str, object], message: str) -> None:
    rig = Rig()
    with pytest.raises(ServiceError, match=message):
        rig.add(**fields)  # type: ignore[arg-type] # bad on purpose
    assert rig.scheduler.num_open == 0 and not rig.scheduler.has_work


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5, beam_width=1),
        SamplingParams(max_tokens=5, beam_width=2, n=3),
        SamplingParams(max_tokens=5, beam_width=2, best_of=2),
        SamplingParams(max_tokens=5, beam_width=2, length_penalty=math.nan),
        SamplingParams(max_tokens=5, n=3, best_of=2),
    ],
)
def test_searches_out_of_range_are_refused(params: SamplingParams) -> None:
    with pytest.raises(ServiceError) as caught:
        Rig().scheduler.add(EngineRequest(ID, (1, 2), params))
    assert caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(ServiceError, match="answer at their end only"):
        Rig().scheduler.add(EngineRequest(ID, (1,), SamplingParams(max_tokens=5, beam_width=2), credit=3))


def test_what_is_not_open_cannot_be_changed() -> None:
    scheduler = Rig().scheduler
    changes: list[Callable[[], None]] = [
        lambda: scheduler.grant(ID, 1, 0.0),
        lambda: scheduler.append(ID, [1], 0.0),
        lambda: scheduler.close_input(ID, 0.0),
        lambda: scheduler.update(ID, 1, None, None),
    ]
    for change in changes:
        with pytest.raises(ServiceError) as caught:
            change()
        assert caught.value.code is Code.NOT_FOUND


def test_grants_out_of_range_are_refused() -> None:
    rig = Rig()
    rig.add()
    with pytest.raises(ServiceError, match="its credit is unlimited"):
        rig.scheduler.grant(ID, 1, 0.0)
    rig.add(OTHER, credit=5)
    for num in (-1, (1 << 20) + 1, 1 << 20):
        with pytest.raises(ServiceError, match="is not in"):
            rig.scheduler.grant(OTHER, num, 0.0)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    rig = Rig(max_queued_requests=2)
    for number in range(2):
        rig.add(f"{number:032x}")
    with pytest.raises(ServiceError, match="2 requests are open; this server admits 2") as caught:
        rig.add()
    assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_after_s > 0
    tokens = Rig(max_queued_tokens=20)
    tokens.add(num_prompt=30)  # alone it may always queue
    with pytest.raises(ServiceError, match="prompts of 30 tokens are queued, 6 more would pass this server's 20"):
        tokens.add(OTHER)


def test_who_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    rig = Rig(num_blocks=12, max_overtakes=3)
    for number in range(2):
        rig.add(f"a{number:031x}", num_prompt=8, max_tokens=8)
    rig.step()
    rig.add("b" * 32, num_prompt=36, max_tokens=2)
    for number in range(20):
        rig.add(f"c{number:031x}", num_prompt=2, max_tokens=2)
    long = rig.scheduler._state.groups["b" * 32].sequences[0]
    waiting = []
    while long.state is SequenceStatus.WAITING:
        waiting.append((rig.scheduler.num_waiting, long.group.num_overtaken))
        rig.step()
    assert waiting[0] == (21, 0) and waiting[1:] and set(waiting[1:]) == {(18, 3)}, "three got past it, no more"
    rig.run()
    assert rig.scheduler.num_open == 0


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    cache = KVCache(1000, 4, prefix_caching=True)
    scheduler = Scheduler(cache, Limits(context_length=512, vocab_size=50), (7,), 16, 128)
    for number in range(8):
        params = SamplingParams(max_tokens=2)
        scheduler.add(EngineRequest(f"{number:032x}", (number,) * 450, params))
    for _ in range(5):
        plan = scheduler.plan(0.0)
        assert plan is not None
        assert len(plan.slots) == 4, "so many long prompts take turns"
        scheduler.apply(plan, StepResult([9] * len(plan.slots)), 0.0)
    scheduler.add(EngineRequest("f" * 32, (3,) * 8, SamplingParams(max_tokens=2)))
    steps = 0
    while True:
        steps += 1
        plan = scheduler.plan(0.0)
        assert plan is not None
        events, _ = scheduler.apply(plan, StepResult([9] * len(plan.slots)), 0.0)
        if any(event.request_id == "f" * 32 for event in events):
            break
    assert steps == 1
