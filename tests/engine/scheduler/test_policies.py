"""The scheduling policies: order, refusals, and freedom from starvation."""

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.policies import POLICIES, make_policy
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.step_rates import StepRates
from sluice_server.engine.scheduler.validation import RequestValidator

LIMITS = Limits(context_length=256, vocab_size=50)
DOOR = RequestValidator(KVCache(256, 4, prefix_caching=True), LIMITS, (7,), 8)


def group(number: int, max_tokens: int = 10, **fields: object) -> SequenceGroup:
    params = SamplingParams(max_tokens=max_tokens)
    return DOOR.open(EngineRequest(f"{number:032x}", (1, 2, 3), params, **fields), number)  # type: ignore[arg-type] # mixed


def ordered(
    policy: str, groups: list[SequenceGroup], lengths: OutputLengths | None = None, **settings: float
) -> list[int]:
    """The arrival numbers in the order of the policy."""
    chosen = make_policy(SchedulerSettings(policy=policy, **settings), lengths or OutputLengths(), 256)  # type: ignore[arg-type] # mixed
    for one in groups:
        chosen.enter(one)
    return [one.order for one in sorted(groups, key=lambda one: (chosen.measure(one), one.order))]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ServiceError, match="'lottery' is not one of deadline, fair, fcfs, priority, sjf") as caught:
        Scheduler(KVCache(8, 4, True), LIMITS, (), 2, 8, SchedulerSettings(policy="lottery"))
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_first_come_first_served() -> None:
    assert ordered("fcfs", [group(2, priority=9), group(1), group(3, arrival_s=-5.0)]) == [1, 2, 3]


def test_waiting_outweighs_priority_in_the_end() -> None:
    low, high = group(1, arrival_s=0.0), group(2, arrival_s=24.0, priority=5)
    assert ordered("priority", [low, high], ageing_s=5.0) == [2, 1]
    late = group(3, arrival_s=26.0, priority=5)
    assert ordered("priority", [low, late], ageing_s=5.0) == [1, 3]


def test_a_target_for_the_first_token_orders_one_level() -> None:
    patient, hurried, higher = group(1), group(2, ttft_target_s=0.5), group(3, priority=1)
    assert ordered("priority", [patient, hurried, higher], ageing_s=5.0) == [3, 2, 1]


def test_shortest_first_by_limit_then_by_what_the_tenant_is_known_for() -> None:
    assert ordered("sjf", [group(1, max_tokens=200), group(2, max_tokens=20)]) == [2, 1]
    lengths = OutputLengths()
    lengths.observe("brief", 5)
    assert ordered("sjf", [group(1, max_tokens=20), group(2, max_tokens=200, tenant="brief")], lengths) == [2, 1]


def test_no_request_is_overtaken_by_one_that_comes_a_starvation_bound_later() -> None:
    long, short = group(1, max_tokens=253), group(2, max_tokens=1, arrival_s=31.0)
    assert ordered("sjf", [long, short], starvation_s=30.0) == [1, 2]


def test_earliest_deadline_or_target_first() -> None:
    groups = [group(1), group(2, deadline_s=9.0), group(3, arrival_s=1.0, ttft_target_s=2.0)]
    assert ordered("deadline", groups) == [3, 2, 1]


def test_a_deadline_that_cannot_be_met_is_refused_at_the_measured_rate() -> None:
    policy, pace = make_policy(SchedulerSettings(policy="deadline"), OutputLengths(), 256), StepRates()
    hopeless = group(1, max_tokens=100, deadline_s=5.0)
    assert policy.refusal(hopeless, 0.0, pace) is None  # nothing is measured yet
    pace.record(0.1, 10)
    refusal = policy.refusal(hopeless, 0.0, pace)
    assert refusal is not None and (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "DEADLINE_UNATTAINABLE")
    assert refusal.retry_after_s > 0 and refusal.details == {"actual": "10.000", "limit": "5.000"}
    assert policy.refusal(group(2, max_tokens=20, deadline_s=5.0), 0.0, pace) is None
    assert policy.refusal(group(3), 0.0, pace) is None


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    policy = make_policy(SchedulerSettings(policy="fair"), OutputLengths(), 256)
    busy, more, late = group(1, tenant="a"), group(2, tenant="a"), group(3, tenant="b")
    for one in (busy, more):
        policy.enter(one)
    policy.start(busy)
    policy.enter(late)
    assert policy.measure(late) == policy.measure(more) > 0
    policy.start(late)
    policy.leave(late)  # it sampled nothing: its charge is corrected, and the tenant forgotten with its last request
    with pytest.raises(KeyError):
        policy.measure(late)


@pytest.mark.parametrize(("weight", "ratio"), [(1.0, 1.0), (3.0, 3.0)])
def test_backlogged_tenants_share_by_weight(weight: float, ratio: float) -> None:
    settings = SchedulerSettings(policy="fair", tenant_weights={"a": weight})
    scheduler = Scheduler(KVCache(400, 4, True), LIMITS, (), 8, 64, settings)
    tenants, served = {}, {"a": 0, "b": 0}
    for number in range(400):
        tenant = "ab"[number >= 200]  # all of one tenant come first
        params = SamplingParams(max_tokens=4 + number % 13)
        scheduler.add(EngineRequest(f"{number:032x}", (number % 50,) * 5, params, tenant=tenant))
        tenants[f"{number:032x}"] = tenant
    for _ in range(120):
        plan = scheduler.plan(0.0)
        assert plan is not None
        events, _ = scheduler.apply(plan, StepResult([9] * len(plan.slots)), 0.0)
        for event in events:
            served[tenants[event.request_id]] += 1
    assert served["a"] / served["b"] == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_every_request(policy: str) -> None:
    scheduler = Scheduler(KVCache(12, 4, True), LIMITS, (), 4, 16, SchedulerSettings(policy=policy))
    for number in range(20):
        params = SamplingParams(max_tokens=1 + number % 9)
        scheduler.add(
            EngineRequest(f"{number:032x}", (number,) * (1 + number % 7), params, number % 3, tenant="ab"[number % 2])
        )
    ended: set[str] = set()
    while (plan := scheduler.plan(0.0)) is not None:
        events, _ = scheduler.apply(plan, StepResult([9] * len(plan.slots)), 0.0)
        ended.update(event.request_id for event in events if event.is_last)
    assert len(ended) == 20
