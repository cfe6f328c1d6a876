"""Sampling and scoring in one op: the same as one op after the other, for any number of threads."""

import math

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.reference import sampling
from sluice_server.kernels.reference.adjust import NO_CHANGES, BannedTokens, LogitAdjustments, adjust_
from sluice_server.kernels.reference.choice import ChosenTokens, ScoredRows
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import ScoreRequest, score, score_buffer
from tests.kernels.reference.test_adjust import random_changes
from tests.kernels.reference.test_sampling import mixed_rows, random_logits

ROWS, VOCAB = 20, 4096  # worth several threads


@pytest.fixture(params=["reference", "v3", "v4", "v4_vnni"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = builds.load(request.param) if request.param in builds.runnable() else None
    if module is None and request.param != "reference":
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(native_sampling, "MODULE", module)


def wanted() -> ScoredRows:
    """Scores wanted of every third row, some with ids of their own."""
    at = torch.arange(1, ROWS, 3)
    pairs = torch.tensor([[0, 0, 3, 5], [7, 4000, 11, 9]])
    nums = torch.arange(len(at)) % 4
    width = int(nums.max())
    return ScoredRows(at, nums, pairs[0].contiguous(), pairs[1].contiguous(), width, score_buffer(len(at), width, 4))


def lists(chosen: ChosenTokens) -> tuple[list[int], list[tuple[object, ...]]]:
    """Ids, and the valid part of the scores: of each wanted row, then of the pairs."""
    assert chosen.scores is not None
    logprobs, ranks, top_ids, tops, others, other_ranks = (one.tolist() for one in chosen.scores)
    nums = wanted().nums.tolist()
    rows = [(*own, ids[:n], top[:n]) for *own, ids, top, n in zip(logprobs, ranks, top_ids, tops, nums, strict=True)]
    return chosen.ids.tolist(), [*rows, *zip(others, other_ranks, strict=True)]


def apart(logits: Tensor, rows: Rows, changes: LogitAdjustments) -> ChosenTokens:
    """The same by the reference ops, one after the other."""
    want, raw = wanted(), logits[wanted().at]
    adjust_(logits, changes)
    ids, _ = sampling.sample(logits, rows)
    return ChosenTokens(ids, score(raw, ScoreRequest(ids[want.at], want.nums, want.rows, want.others, want.width)))


@pytest.mark.parametrize("changes", [NO_CHANGES, random_changes(ROWS, VOCAB)], ids=["as they are", "changed"])
def test_all_at_once_is_one_after_the_other(changes: LogitAdjustments) -> None:
    logits, rows = random_logits(ROWS, VOCAB), mixed_rows(ROWS)
    apart_logits, want = logits.clone(), wanted()
    expected, found = apart(apart_logits, rows, changes), ops.choose(logits, rows, changes, want)
    assert torch.equal(found.ids, expected.ids)  # no two scores of these rows nearly tie
    adjust_(logits, LogitAdjustments(changes.masks))  # drawing may leave what masks forbid as it is
    torch.testing.assert_close(logits, apart_logits, rtol=1e-6, atol=1e-6)
    assert found.scores is not None and expected.scores is not None
    for one, other, name in zip(found.scores, expected.scores, found.scores._fields, strict=True):
        if name.startswith("top"):
            shown = torch.arange(want.width) < want.nums[:, None]
            one, other = one[shown], other[shown]
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_threads_change_nothing() -> None:
    if native_sampling.MODULE is None:
        pytest.skip("the reference has torch's threads")
    rows, changes, found = mixed_rows(ROWS), random_changes(ROWS, VOCAB), []
    for num in (1, 2, 3, 5):
        native_sampling.MODULE.set_threads(num)
        found += [lists(ops.choose(random_logits(ROWS, VOCAB), rows, changes, wanted())) for _ in range(3)]
    native_sampling.MODULE.set_threads(torch.get_num_threads())
    assert all(one == found[0] for one in found[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_no_numbers_fails_alone(value: float) -> None:
    rows = mixed_rows(ROWS)
    ids, scores = lists(ops.choose(random_logits(ROWS, VOCAB), rows, NO_CHANGES, wanted()))
    logits = random_logits(ROWS, VOCAB)
    logits[4, slice(None) if value == -math.inf else 9] = value  # the second that is wanted, without pairs
    found_ids, found = lists(ops.choose(logits, rows, NO_CHANGES, wanted()))
    assert found_ids == [*ids[:4], -1, *ids[5:]]
    assert found[:1] + found[2:] == scores[:1] + scores[2:]


def test_what_is_scored_is_not_what_was_changed() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = 5.0
    nobody = torch.empty(0, dtype=torch.int64)
    want = ScoredRows(torch.tensor([0]), torch.tensor([1]), nobody, nobody, 1, score_buffer(1, 1, 0))
    banned_tokens = BannedTokens(torch.tensor([0] * 7), torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    found = ops.choose(logits, mixed_rows(1), LogitAdjustments(banned_tokens=banned_tokens), want)
    assert found.ids.tolist() == [7] and found.scores is not None
    assert found.scores.ranks.tolist() == [2] and found.scores.top_ids.tolist() == [[3]]
    assert math.isclose(found.scores.logprobs[0], -math.log(math.exp(5) + 7), abs_tol=1e-5)
