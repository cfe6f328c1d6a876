"""The C++ sampler against its torch reference, for each instruction set: equal tokens unless two scores nearly tie."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.reference.adjust import BannedTokens, LogitAdjustments, LogitBiases, TokenMask
from sluice_server.kernels.reference.philox import gumbel, uniforms
from sluice_server.kernels.reference.sampling import Rows, sample
from tests.kernels.reference.test_sampling import ALL, Params, mixed_rows, random_logits, rows_of

TIE = 1e-5


@pytest.fixture(params=["v3", "v4", "v4_vnni"], autouse=True)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = builds.load(request.param) if request.param in builds.runnable() else None
    if module is None:
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(native_sampling, "MODULE", module)


def score(logits: Tensor, rows: Rows, row: int, token: int) -> float:
    """The score by which a kept id is chosen."""
    one = rows.take(torch.tensor([row]))
    noise = gumbel(uniforms(one.seeds, one.positions, one.outputs, torch.tensor([[token]])))
    return float((logits[row, token] - logits[row].amax()) / one.temperature[0] + noise[0, 0])


def check_equal(logits: Tensor, rows: Rows) -> None:
    expected, bad = sample(logits, rows)
    found, found_bad = ops.sample(logits, rows)
    assert torch.equal(found_bad, bad)
    for row in (found != expected).nonzero()[:, 0].tolist():
        scores = [score(logits, rows, row, int(ids[row])) for ids in (found, expected)]
        assert abs(scores[0] - scores[1]) < TIE


@pytest.mark.parametrize("vocab", [1, 7, 111, 4096, 32_003])
@pytest.mark.parametrize("params", ALL)
def test_tokens_are_those_of_the_reference(vocab: int, params: Params) -> None:
    for scale in (0.3, 3.0, 20.0):
        logits = random_logits(12, vocab, scale, seed=vocab)
        check_equal(logits, rows_of(12, *params))
        check_equal(logits, mixed_rows(12))


def test_a_vocabulary_of_152000() -> None:
    check_equal(random_logits(6, 151_936), mixed_rows(6))


def test_a_row_alone_gets_the_token_it_gets_in_company() -> None:
    logits, rows = random_logits(64, 1000), mixed_rows(64)
    together, _ = ops.sample(logits, rows)
    for row in range(64):
        alone, _ = ops.sample(logits[row : row + 1].clone(), rows.take(torch.tensor([row])))
        assert alone[0] == together[row]


def test_ties_are_kept_whole_and_the_lowest_id_is_greedy() -> None:
    logits = torch.full((300, 20), -50.0)
    logits[:, [4, 9, 11]] = 1.0
    for top_k, top_p in ((2, 1.0), (0, 0.3), (2, 0.3)):
        ids, _ = ops.sample(logits, rows_of(300, 1.0, top_k, top_p, 0.0))
        assert set(ids.tolist()) == {4, 9, 11}
    assert set(ops.sample(logits, rows_of(300, 0.0, 0, 1.0, 0.0))[0].tolist()) == {4}
    assert len(set(ops.sample(torch.zeros(500, 40), rows_of(500, 1.0, 0, 0.99, 0.0))[0].tolist())) == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows_are_named_and_the_others_unharmed(temperature: float) -> None:
    logits = random_logits(6, 111)
    expected, _ = ops.sample(logits.clone(), rows_of(6, temperature, 0, 1.0, 0.0))
    for row, at, value in ((0, 110, math.nan), (2, 3, math.inf), (4, slice(None), -math.inf)):
        logits[row, at] = value
    ids, bad = ops.sample(logits, rows_of(6, temperature, 0, 1.0, 0.0))
    assert bad.tolist() == [True, False, True, False, True, False]
    assert ids[1::2].tolist() == expected[1::2].tolist()


@pytest.mark.parametrize("params", ALL)
def test_minus_infinity_is_never_drawn(params: Params) -> None:
    logits = torch.full((200, 111), -math.inf)
    logits[:, [5, 70]] = torch.tensor([0.0, -1.0])
    assert set(ops.sample(logits, rows_of(200, *params))[0].tolist()) <= {5, 70}


@pytest.mark.parametrize("params", ALL)
@pytest.mark.parametrize("num_allowed", [0, 1, 3, 90, 2_500])
def test_tokens_of_a_mask_do_not_depend_on_what_it_forbids(num_allowed: int, params: Params) -> None:
    """Whether its ids are few, and looked at one by one, or many; with changes of some logits, and some not numbers."""
    count, vocab, generator = 24, 4_003, torch.Generator().manual_seed(num_allowed)
    allowed = torch.zeros(count, 4_032, dtype=torch.bool)
    for row in allowed:
        row[torch.randperm(vocab, generator=generator)[:num_allowed]] = True
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32))
    mask = TokenMask(torch.arange(count), bits)
    may = allowed[:, :vocab]
    logits, rows = random_logits(count, vocab), rows_of(count, *params)
    at = torch.arange(count)
    biases = LogitBiases(at, torch.where(may.any(1), may.int().argmax(1), 0), torch.full((count,), 3.0))
    banned = BannedTokens(at[::5].contiguous(), torch.full((len(at[::5]),), 17))
    barred = logits.masked_fill(~may, -math.inf)
    broken = logits.masked_fill(~may, math.nan)
    for one in (barred, broken):
        one[3, may[3].nonzero()[:1, 0]] = math.inf
    expected = ops.choose(barred, rows, LogitAdjustments((), banned, biases), None).ids
    found = ops.choose(broken, rows, LogitAdjustments((mask,), banned, biases), None).ids
    assert torch.equal(found, expected)
    assert found[3] == -1 and (num_allowed == 0) == bool((found < 0).all())
    assert broken[0].isneginf().all() == (num_allowed == 0)


def test_other_logits_go_to_the_reference() -> None:
    logits = random_logits(8, 222)[:, ::2]
    rows = mixed_rows(8)
    assert not native_sampling.takes(logits)
    assert torch.equal(ops.sample(logits, rows)[0], sample(logits, rows)[0])
