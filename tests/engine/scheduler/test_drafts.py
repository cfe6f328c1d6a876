"""Drafts in the scheduler, case by case: verified, kept, charged and returned."""

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import DraftTree, StepPlan, StepResult, TokenLogprob, VerifiedDrafts, num_accepted
from sluice_server.engine.request import EngineRequest, FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.speculation.controller import AcceptanceRecord, SpeculationController

LIMITS = Limits(context_length=64, vocab_size=50)
EOS = 7


def make(num_blocks: int = 40, budget: int = 16, max_draft_tokens: int = 4) -> Scheduler:
    settings = SchedulerSettings(max_draft_tokens=max_draft_tokens, adapts_drafts=False, watermark=-3.0)
    return Scheduler(KVCache(num_blocks, 4, prefix_caching=True), LIMITS, (EOS,), 8, budget, settings)


def request(number: int = 1, num_prompt: int = 5, credit: int | None = None, **params: int) -> EngineRequest:
    options = SamplingParams(**{"max_tokens": 20, **params})  # type: ignore[arg-type] # mixed values
    prompt = tuple((number * 7 + i) % 50 for i in range(num_prompt))
    return EngineRequest(f"{number:032x}", prompt, options, credit=credit)


def step(
    scheduler: Scheduler, drafts: list[int], sampled: list[int], logprobs: int = 0, grow: bool = False
) -> tuple[StepPlan, list[Sampled]]:
    """Offers the same drafts to all sequences; each row samples `sampled`, as far as it samples."""
    asks = scheduler.asks(grow=grow)
    scheduler.offer(asks, [drafts[: ask.num] for ask in asks], 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    found = tuple(TokenLogprob(-float(i), 1) for i in range(logprobs))
    runs = {i: VerifiedDrafts(tuple(sampled[: num + 1]), found[: num + 1]) for i, num in plan.drafts.items()}
    events, failures = scheduler.apply(plan, StepResult([sampled[0]] * len(plan.slots), runs=runs), 0.0)
    assert not failures
    scheduler.check()
    return plan, events


def begin(scheduler: Scheduler, *requests: EngineRequest) -> None:
    """Computes the prompts and samples the first token of each sequence."""
    for one in requests:
        scheduler.add(one)
    step(scheduler, [], [1])


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [([11, 12, 13, 14, 15], 5), ([11, 12, 40, 14, 15], 3), ([40, 12, 13, 14, 15], 1)],
    ids=["all", "two of four", "none"],
)
def test_the_longest_prefix_that_was_sampled_too_is_kept(sampled: list[int], kept: int) -> None:
    scheduler = make()
    begin(scheduler, request())
    plan, events = step(scheduler, [11, 12, 13, 14], sampled)
    assert (plan.query_lens, plan.starts, plan.drafts) == ([5], [5], {0: 4})
    assert plan.token_ids == [1, 11, 12, 13, 14]
    assert [(event.first_index, event.token_ids) for event in events] == [(1, tuple(sampled[:kept]))]
    after, _ = step(scheduler, [], [2])
    assert after.starts == [5 + kept]
    assert after.token_ids == [sampled[kept - 1]]
    assert scheduler.draft_stats == DraftStats(4, kept - 1, [1, 1, 1, 1], [int(i < kept - 1) for i in range(4)])


def test_blocks_of_wrong_drafts_are_given_back_and_never_found() -> None:
    scheduler = make(max_draft_tokens=9)
    begin(scheduler, request(num_prompt=7))
    step(scheduler, [10, 11, 12, 13, 14, 15], [40, 0, 0, 0, 0, 0, 0])
    assert scheduler.cache.pool.num_held == 2  # of 8 tokens
    right = tuple((7 + i) % 50 for i in range(7))
    scheduler.add(EngineRequest(f"{2:032x}", (*right, 1, 10, 11, 12, 13, 14), SamplingParams(max_tokens=1)))
    _, events = step(scheduler, [], [40])
    admission = next(event.admission for event in events if event.request_id == f"{2:032x}")
    assert admission is not None
    assert admission.num_cached == 8


@pytest.mark.parametrize(
    ("params", "finish", "kept"),
    [
        ({}, FinishReason.EOS, (11, EOS)),
        ({"ignore_eos": 1}, None, (11, EOS, 13, 14, 15)),
        ({"max_tokens": 3, "ignore_eos": 1}, FinishReason.LENGTH, (11, EOS)),
    ],
    ids=["eos", "eos is ignored", "max_tokens"],
)
def test_nothing_follows_the_end(params: dict[str, int], finish: FinishReason | None, kept: tuple[int, ...]) -> None:
    scheduler = make()
    begin(scheduler, request(**params))
    _, events = step(scheduler, [11, EOS, 13, 14], [11, EOS, 13, 14, 15])
    assert [(event.token_ids, event.finish) for event in events] == [(kept, finish)]
    if finish is not None:
        assert events[0].times is not None
        assert events[0].times.num_accepted == min(len(kept), events[0].times.num_drafted)
        assert (len(events[0].times.drafted_at), sum(events[0].times.accepted_at)) == (
            events[0].times.num_drafted,
            events[0].times.num_accepted,
        )
        assert scheduler.cache.pool.num_held == 0


def test_log_probabilities_go_with_the_tokens_that_are_kept() -> None:
    scheduler = make()
    begin(scheduler, request(logprobs=0))
    _, events = step(scheduler, [11, 12], [11, 40, 0], logprobs=3)
    assert [logprob.logprob for logprob in events[0].logprobs] == [0.0, -1.0]


def test_credit_is_never_passed_and_comes_back_for_wrong_drafts() -> None:
    scheduler = make()
    begin(scheduler, request(credit=4))
    plan, events = step(scheduler, [11, 12, 13, 14], [11, 40, 0, 0, 0])
    assert plan.drafts == {0: 2}  # three tokens are left
    assert events[0].token_ids == (11, 40)
    plan, _ = step(scheduler, [11, 12], [41])
    assert not plan.drafts
    assert not scheduler.has_work
    assert scheduler.plan(0.0) is None


@pytest.mark.parametrize(("server", "own", "num"), [(4, None, 4), (4, 2, 2), (4, 9, 4), (4, 0, 0), (0, 3, 0)])
def test_server_and_request_both_limit_drafts(server: int, own: int | None, num: int) -> None:
    scheduler = make(max_draft_tokens=server)
    begin(scheduler, EngineRequest("a", (1, 2), SamplingParams(max_tokens=20), max_draft_tokens=own))
    assert [ask.num for ask in scheduler.asks()] == [num] * (num > 0)


def test_a_limit_that_no_step_can_reach_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"speculation\.max_tokens"):
        make().add(EngineRequest("a", (1, 2), SamplingParams(), max_draft_tokens=65))


def test_drafts_take_what_prompts_leave() -> None:
    scheduler = make(budget=12)
    begin(scheduler, request())
    scheduler.add(request(2, num_prompt=9))
    plan, _ = step(scheduler, [11, 12, 13, 14], [11, 12, 40])
    assert sorted(plan.query_lens) == [3, 9]
    scheduler.add(request(3, num_prompt=40))
    plan, _ = step(scheduler, [11, 12, 13, 14], [9])
    assert plan.query_lens == [1, 1, 10]
    assert scheduler.asks() == []  # the long prompt takes all


def test_rows_of_one_token_come_first() -> None:
    scheduler = make()
    begin(scheduler, request(1), request(2))
    asks = scheduler.asks()
    assert len(asks) == 2
    scheduler.offer(asks, [[11, 12], []], 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert (plan.query_lens, plan.drafts) == ([1, 3], {1: 2})


@pytest.mark.parametrize("grow", [False, True])
def test_drafts_preempt_no_sequence(grow: bool) -> None:
    scheduler = make(num_blocks=5)
    begin(scheduler, request(1, num_prompt=10, max_tokens=6), request(2, num_prompt=4, max_tokens=4))
    plan, _ = step(scheduler, [11] * 4, [40] * 5, grow=grow)
    assert scheduler.num_preemptions == 0
    assert plan.query_lens == [2, 3]  # the fifth block is the second's, for its own token


def test_drafts_that_no_plan_took_are_dropped() -> None:
    scheduler = make()
    begin(scheduler, request(1))
    scheduler.offer(scheduler.asks(), [[11, 12]], 0.0)
    scheduler.cancel(f"{1:032x}")
    assert scheduler.plan(0.0) is None
    assert scheduler.cache.pool.num_held == 0


def test_a_prefix_is_accepted_and_nothing_behind_it() -> None:
    assert num_accepted([1, 2, 3], [1, 9, 3, 4]) == 1
    assert num_accepted([], [1]) == 0
    assert num_accepted([1, 2], [1, 2, 3]) == 2


def test_blocks_can_be_had_before_drafts_are_made_and_go_back_unused() -> None:
    scheduler = make(max_draft_tokens=9)
    begin(scheduler, request(1, num_prompt=7))
    (ask,) = scheduler.asks(grow=True)
    assert len(ask.blocks) == 4  # of 8 tokens that exist and 8 of the 9 drafts
    assert scheduler.cache.pool.num_held == 4
    scheduler.offer([ask], [[]], 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.cache.pool.num_held == 2
    scheduler.apply(plan, StepResult([9]), 0.0)
    scheduler.asks(grow=True)  # and no proposer answers
    scheduler.cancel(f"{1:032x}")
    assert scheduler.plan(0.0) is None
    assert scheduler.cache.pool.num_held == 0


def test_a_model_is_not_asked_to_read_a_long_prompt_for_a_few_tokens() -> None:
    scheduler = make(budget=64)
    begin(scheduler, request(1, num_prompt=40, max_tokens=5), request(2, num_prompt=10, max_tokens=5))
    assert [len(ask.tokens) for ask in scheduler.asks()] == [41, 11]
    assert [len(ask.tokens) for ask in scheduler.asks(grow=True)] == [11]


def test_the_controller_learns_that_no_sequence_can_have_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the controller would be asked at every step."""
    told = []

    def choose(self: SpeculationController, records: list[AcceptanceRecord], *_: object, **__: object) -> list[int]:
        told.append(len(records))
        return [0] * len(records)

    monkeypatch.setattr(SpeculationController, "choose", choose)
    settings = SchedulerSettings(max_draft_tokens=4, adapts_drafts=True, watermark=-3.0)
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (EOS,), 8, 64, settings)
    begin(scheduler, request(num_prompt=50, max_tokens=4))
    assert scheduler.asks(grow=True) == [] and told == [0]


def wide(max_draft_tokens: int = 9, budget: int = 16) -> Scheduler:
    settings = SchedulerSettings(
        max_draft_tokens=max_draft_tokens, max_draft_width=3, adapts_drafts=False, watermark=-3.0
    )
    return Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (EOS,), 8, budget, settings)


TREE = DraftTree((11, 12, 21, 22, 23), (-1, 0, -1, 0, 2))


def grow_tree(scheduler: Scheduler, tree: DraftTree, run: tuple[int, ...]) -> tuple[StepPlan, list[Sampled]]:
    """Offers a tree to the only sequence; `run` is sampled after the accepted drafts."""
    (ask,) = scheduler.asks()
    scheduler.offer([ask], [tree], 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    events, failures = scheduler.apply(plan, StepResult([run[0]], runs={0: VerifiedDrafts(run)}), 0.0)
    assert not failures
    scheduler.check()
    return plan, events


def test_a_tree_is_verified_along_one_path() -> None:
    scheduler = wide()
    begin(scheduler, request())
    plan, events = grow_tree(scheduler, TREE, (21, 23, 5))
    assert (plan.token_ids, plan.drafts, plan.parents) == ([1, *TREE.token_ids], {0: 5}, {0: TREE.parents})
    assert plan.row(0).parents == plan.parents and plan.row(0).without_drafts().parents == {}
    assert [event.token_ids for event in events] == [(21, 23, 5)]
    after, _ = step(scheduler, [], [2])
    assert (after.starts, after.token_ids) == ([8], [5])
    assert scheduler.draft_stats == DraftStats(5, 2, [1] * 5, [1, 1, 0, 0, 0])


def test_a_tree_ends_where_there_is_no_more_room_or_credit() -> None:
    scheduler = wide(budget=4)
    begin(scheduler, request(num_prompt=4, credit=30))
    plan, _ = grow_tree(scheduler, TREE, (9,))
    assert (plan.drafts, plan.parents) == ({0: 3}, {0: TREE.parents[:3]})
    scheduler = wide(budget=3)
    begin(scheduler, request(num_prompt=3))
    plan, _ = grow_tree(scheduler, TREE, (11, 12, 5))
    assert (plan.drafts, plan.parents) == ({0: 2}, {})  # a chain is left


def test_credit_of_a_tree_comes_back() -> None:
    scheduler = wide()
    begin(scheduler, request(credit=9))
    grow_tree(scheduler, TREE, (21, 23, 5))
    plan, _ = step(scheduler, [31, 32, 33, 34, 35, 36], [31, 32, 33, 34, 35])
    assert plan.drafts == {0: 1}  # width takes its part of the five tokens that are left
    assert plan.query_lens == [2]


@pytest.mark.parametrize(
    ("params", "width", "num"),
    [({}, 3, 3), ({"grammar": "x"}, 1, 9), ({"max_tokens": 4}, 2, 1)],
    ids=["any", "grammar", "short of the end"],
)
def test_how_wide_a_tree_is_asked_for(params: dict[str, int], width: int, num: int) -> None:
    scheduler = wide()
    begin(scheduler, request(**params))
    (ask,) = scheduler.asks()
    assert (ask.width, ask.num) == (width, num)


def test_who_has_not_been_read_to_the_end_is_still_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model reads in parts: such a step says nothing about the cost of a draft or about what is left to read."""
    settings = SchedulerSettings(max_draft_tokens=4, watermark=-3.0)
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (EOS,), 8, 64, settings)
    begin(scheduler, request(1, num_prompt=40), request(2, num_prompt=10))
    asks = sorted(scheduler.asks(grow=True), key=lambda ask: -len(ask.tokens))
    assert [len(ask.tokens) for ask in asks] == [41, 11]
    long, short = (ask.memory for ask in asks)
    long.num_read, long.num_unread, short.num_read = 20, 21, 11
    told: list[tuple[list[int], int]] = []

    def drafted(self: SpeculationController, asked: list[int], seconds: float, *, num_read: int) -> None:
        told.append((asked, num_read))

    monkeypatch.setattr(SpeculationController, "drafted", drafted)
    scheduler.offer(asks, [()] * 2, 1.0)
    assert told == [([4], 20)]
    assert sorted(one.drafting.num_seen for one in scheduler._state.running if one.drafting) == [11, 20]


def test_while_all_rest_steps_may_be_planned_ahead_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are planned ahead ask no proposer but count: the controller tries again no later than without them."""
    settings = SchedulerSettings(max_draft_tokens=4, watermark=-3.0)
    scheduler = Scheduler(KVCache(40, 4, prefix_caching=True), LIMITS, (EOS,), 8, 64, settings)
    passed: list[int] = []

    def rests(self: SpeculationController, num_steps: int = 1) -> bool:
        passed.append(num_steps)
        return len(passed) < 4

    monkeypatch.setattr(SpeculationController, "rests", rests)
    drafts = scheduler._drafts
    assert scheduler.rests() and drafts.num_resting > 0
    assert scheduler.rests()
    drafts.num_resting -= 3
    assert scheduler.rests() and drafts.num_resting > 0
    assert not scheduler.rests()
    assert passed == [1, 1, 4, 1]
