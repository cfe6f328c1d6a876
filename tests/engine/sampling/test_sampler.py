"""The runner's sampler: banned ids, log probabilities, rows without numbers, and all-greedy batches."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.rows import LogprobRows, SamplingParamRows, SamplingRows, join
from sluice_server.engine.sampling.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0)


def rows_of(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    outputs: Sequence[int],
    banned: dict[int, tuple[int, ...]] | None = None,
) -> SamplingRows:
    param_rows = SamplingParamRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        typical_p=np.array([p.typical_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.uint64).view(np.int64),
        output=np.array(outputs, np.int64),
        logprobs=logprob_rows(params),
    )
    return SamplingRows(
        param_rows,
        np.array(positions, np.int64),
        banned=join([(row, np.array(ids)) for row, ids in (banned or {}).items()]),
    )


def logprob_rows(params: Sequence[SamplingParams]) -> LogprobRows | None:
    rows = [row for row, p in enumerate(params) if p.logprobs >= 0]
    nums = np.array([params[row].logprobs for row in rows], np.int64)
    ids = {at: params[row].logprob_token_ids for at, row in enumerate(rows) if params[row].logprob_token_ids}
    return LogprobRows(np.array(rows, np.int64), nums, ids) if rows else None


def random_logits(rows: int, vocab: int = 500) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3


def test_all_greedy_equals_greedy_in_mixed_company() -> None:
    logits = random_logits(4)
    alone = Sampler().sample(logits, rows_of([GREEDY] * 4, range(4), [0] * 4))
    mixed = Sampler().sample(logits, rows_of([GREEDY] * 3 + [SamplingParams(seed=1)], range(4), [0] * 4))
    assert alone.ids == logits.argmax(1).tolist()
    assert mixed.ids[:3] == alone.ids[:3] and alone.bad == mixed.bad == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_fail_alone(temperature: float) -> None:
    logits = random_logits(4)
    logits[1, 7], logits[2] = math.nan, -math.inf
    params = SamplingParams(temperature=temperature, seed=9, logprobs=2)
    sampled = Sampler().sample(logits, rows_of([params] * 4, range(4), [0] * 4))
    clean = Sampler().sample(random_logits(4), rows_of([params] * 4, range(4), [0] * 4))
    assert sampled.bad == [1, 2] and sorted(sampled.logprobs) == [0, 3]
    assert [sampled.ids[0], sampled.ids[3]] == [clean.ids[0], clean.ids[3]]


def test_only_bad_rows_asking_for_logprobs() -> None:
    sampled = Sampler().sample(
        torch.full((2, 9), math.nan), rows_of([SamplingParams(temperature=0, logprobs=1)] * 2, [0, 0], [0, 0])
    )
    assert sampled.bad == [0, 1] and sampled.logprobs == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barred_ids_are_not_sampled_in_their_row_only(temperature: float) -> None:
    logits = torch.full((200, 50), -9.0)
    logits[:, [10, 11, 12]] = torch.tensor([5.0, 4.5, 4.0])
    params = SamplingParams(temperature=temperature, seed=2)
    banned: dict[int, tuple[int, ...]] = {row: (10, 11) for row in range(0, 200, 2)}
    sampled = Sampler().sample(logits, rows_of([params] * 200, range(200), [0] * 200, banned))
    assert not {10, 11} & set(sampled.ids[::2])
    assert 10 in sampled.ids[1::2]


def test_a_row_with_everything_barred_is_bad() -> None:
    sampled = Sampler().sample(torch.zeros(2, 3), rows_of([GREEDY] * 2, [0, 0], [0, 0], {1: (0, 1, 2)}))
    assert sampled.bad == [1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3)
    expected = logits.double().log_softmax(1)
    params = [SamplingParams(temperature=2.0, top_k=3, seed=4, logprobs=5), GREEDY, SamplingParams(seed=8, logprobs=0)]
    best = int(logits[0].argmax())
    sampled = Sampler().sample(logits, rows_of(params, [7, 8, 9], [0, 0, 0], {0: (best,)}))
    assert sorted(sampled.logprobs) == [0, 2]
    first, last = sampled.logprobs[0], sampled.logprobs[2]
    assert first.logprob == pytest.approx(expected[0, sampled.ids[0]].item(), abs=1e-4)
    assert first.rank == 1 + int((expected[0] > expected[0, sampled.ids[0]]).sum()) > 1  # the best was barred
    assert first.top_ids == tuple(expected[0].topk(5).indices.tolist()) and first.top_ids[0] == best
    assert first.top_logprobs == pytest.approx(expected[0].topk(5).values.tolist(), abs=1e-4)
    assert last.top_ids == () and last.logprob == pytest.approx(expected[2, sampled.ids[2]].item(), abs=1e-4)


def test_logprobs_do_not_depend_on_what_others_ask() -> None:
    logits = random_logits(9).round()  # many ties
    few = SamplingParams(temperature=0.0, logprobs=4)
    alone = Sampler().sample(logits[:1].clone(), rows_of([few], [3], [0]))
    crowd = [few] + [SamplingParams(seed=1, logprobs=20)] * 8
    together = Sampler().sample(logits, rows_of(crowd, [3] * 9, [0] * 9))
    assert alone.logprobs[0] == together.logprobs[0]


def test_a_token_is_a_function_of_seed_output_and_position() -> None:
    logits = torch.zeros(4, 5000)
    params = [SamplingParams(seed=2**64 - 1), SamplingParams(seed=2**64 - 1), SamplingParams(seed=2**63)]
    ids = Sampler().sample(logits, rows_of([*params, params[0]], [5, 6, 5, 5], [0, 0, 0, 1])).ids
    again = Sampler().sample(logits[:1].clone(), rows_of(params[:1], [5], [0])).ids
    assert len(set(ids)) == 4 and again == ids[:1]


def test_ids_that_were_asked_for_are_reported_likely_or_not() -> None:
    logits = random_logits(4).round()  # many ties
    logs = logits.log_softmax(1)
    ids = [(3, 400, 7), (), (499,), (3,)]
    params = [SamplingParams(seed=row, logprobs=2 * (row != 2), logprob_token_ids=ids[row]) for row in range(4)]
    params[1] = SamplingParams(seed=1)
    found = Sampler().sample(logits.clone(), rows_of(params, range(4), [0] * 4)).logprobs
    assert sorted(found) == [0, 2, 3]
    for row, one in found.items():
        assert one.asked_ids == ids[row] and len(one.top_ids) == params[row].logprobs
        assert one.asked_logprobs == pytest.approx(logs[row, list(ids[row])].tolist(), abs=1e-5)
        assert list(one.asked_ranks) == [1 + int((logits[row] > logits[row, token]).sum()) for token in ids[row]]
    alone = Sampler().sample(logits[2:3].clone(), rows_of(params[2:3], [2], [0])).logprobs
    assert alone[0] == found[2]


def test_a_row_that_allows_nothing_says_so() -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = math.nan
    everything: dict[int, tuple[int, ...]] = {1: (0, 1, 2, 3)}
    sampled = Sampler().sample(logits, rows_of([SamplingParams(seed=1, logprobs=1)] * 3, range(3), [0] * 3, everything))
    assert sampled.bad == [1, 2] and sorted(sampled.logprobs) == [0]
    assert [(row, error.reason) for row, error in sampled.errors.items()] == [(1, "NO_TOKEN_LEFT")]
