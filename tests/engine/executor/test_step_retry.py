"""The retry of a failed step: the whole plan, then row by row, then in pieces."""

import dataclasses

import pytest

from sluice_server.engine.errors import DeviceLost, OutOfDeviceMemory
from sluice_server.engine.executor.step_retry import StepRetry
from sluice_server.engine.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprob, VerifiedDrafts, num_accepted

PLAN = StepPlan(1, [0, 1, 2], [1, 5, 2], [9, 0, 3], list(range(8)), [True, True, False], [], [])

TOLD = {1: PromptLogprobs(1, tuple(TokenLogprob(float(at), 1) for at in range(5)))}


@dataclasses.dataclass
class Fragile:
    """A runner that computes a limited number of tokens at once, fails on one token id, and is lost at another."""

    is_done = True
    most: int = 100
    bad: int = -1
    deadly: int = -1
    computed: list[StepPlan] = dataclasses.field(default_factory=list)

    def launch(self, plan: StepPlan) -> "Fragile":
        if self.deadly in plan.token_ids:
            raise DeviceLost
        if self.bad in plan.token_ids:
            raise ValueError(self.bad)
        if plan.num_tokens > self.most:
            raise OutOfDeviceMemory
        self.computed.append(plan)
        return self

    def collect(self) -> StepResult:
        """The results; row 1 returns its prompt's tokens as their log probabilities."""
        plan, ends = self.computed[-1], 0
        tokens = []
        told = {
            i: PromptLogprobs(start + 1, tuple(TokenLogprob(float(start + at), 1) for at in range(num)))
            for i, (slot, start, num) in enumerate(zip(plan.slots, plan.starts, plan.query_lens, strict=True))
            if slot == 1
        }
        for num, samples in zip(plan.query_lens, plan.samples, strict=True):
            ends += num
            tokens.append(100 + plan.token_ids[ends - 1] if samples else -1)
        return StepResult(tokens, prompts=told)


def test_a_plan_that_nothing_happens_to_is_computed_once() -> None:
    device = Fragile()
    attempt = StepRetry(device, PLAN)
    assert attempt.result() == StepResult([100, 105, -1], prompts=TOLD)
    assert device.computed == [PLAN] and not attempt.ran_out


def test_only_the_guilty_row_fails() -> None:
    result = StepRetry(Fragile(bad=3), PLAN).result()
    assert dataclasses.replace(result, errors={}) == StepResult([100, -1, -1], frozenset({1}))
    assert [type(error.__cause__) for error in result.errors.values()] == [ValueError]


def test_a_row_that_nobody_waits_for_is_not_computed_again() -> None:
    """Its slot and blocks may be another's by now."""
    device = Fragile(most=6)
    result = StepRetry(device, PLAN, awaited=lambda plan: [True, False, True]).result()
    assert (result.token_ids, result.failed) == ([100, -1, -1], frozenset({1}))
    assert [plan.slots for plan in device.computed] == [[0], [2]]


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_without_memory_a_row_is_computed_in_pieces_that_follow_each_other(most: int) -> None:
    device = Fragile(most=most)
    attempt = StepRetry(device, PLAN)
    assert attempt.result() == StepResult([100, 105, -1], prompts=TOLD)
    assert attempt.ran_out
    for slot, start, tokens in ((0, 9, [0]), (1, 0, [1, 2, 3, 4, 5]), (2, 3, [6, 7])):
        pieces = [plan for plan in device.computed if plan.slots == [slot]]
        assert [token for plan in pieces for token in plan.token_ids] == tokens
        at = start
        for plan in pieces:
            assert plan.starts == [at]
            at += plan.num_tokens
        assert [plan.samples for plan in pieces[:-1]] == [[False]] * (len(pieces) - 1)


def test_a_device_without_any_memory_fails_requests_and_does_not_hang() -> None:
    result = StepRetry(Fragile(most=0), PLAN).result()
    assert dataclasses.replace(result, errors={}) == StepResult([-1, -1, -1], frozenset({0, 1, 2}))
    assert [type(error.__cause__) for error in result.errors.values()] == [OutOfDeviceMemory] * 3


@pytest.mark.parametrize(("most", "bad"), [(100, -1), (1, -1), (100, 0)])
def test_a_lost_device_fails_no_request(most: int, bad: int) -> None:
    with pytest.raises(DeviceLost):
        StepRetry(Fragile(most=most, bad=bad, deadly=7), PLAN).result()


@pytest.mark.parametrize("device", [Fragile(bad=3), Fragile(most=2)], ids=["raises", "memory"])
def test_a_draft_that_is_too_much_is_dropped_and_its_request_goes_on(device: Fragile) -> None:
    plan = dataclasses.replace(PLAN, query_lens=[1, 2, 5], drafts={2: 3})
    result = StepRetry(
        device, dataclasses.replace(plan, token_ids=[0, 1, 2, 5, 6, 3, 3, 3], samples=[True] * 3)
    ).result()
    assert (result.token_ids, result.failed, result.runs) == ([100, 102, 106], frozenset(), {2: VerifiedDrafts((106,))})
    assert num_accepted([3, 3, 3], result.runs[2].token_ids) == 0
    assert not any(plan.drafts for plan in device.computed)
