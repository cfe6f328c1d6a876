"""Changes of logits and log probabilities: equal to their references, and nothing else is written."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.reference import adjust as reference
from sluice_server.kernels.reference import scores as score_reference
from sluice_server.kernels.reference.adjust import BannedTokens, LogitAdjustments, LogitBiases, Penalties, TokenMask
from sluice_server.kernels.reference.scores import ScoreRequest
from sluice_server.kernels.triton import adjust, scores
from tests.kernels.triton.harness import Guarded

VOCABS = [40, 111, 4099]


def logits_of(rows: int, vocab: int) -> Guarded:
    torch.manual_seed(vocab)
    made = Guarded.of((rows, vocab), torch.float32)
    made.tensor.copy_(torch.randn(rows, vocab) * 4)
    return made


def pairs_of(rows: int, vocab: int, num: int) -> tuple[Tensor, Tensor]:
    """Distinct pairs (row, id)."""
    places = torch.randperm(rows * vocab, generator=torch.Generator().manual_seed(num))[:num]
    return places // vocab, places % vocab


def penalties_of(rows: int, vocab: int, num: int) -> Penalties:
    """Random penalties of every other row; the first of them has no id."""
    generator = torch.Generator().manual_seed(num)
    chosen = torch.arange(0, rows, 2)
    sizes = torch.tensor([0, *[num] * (len(chosen) - 1)])
    ids = torch.cat([torch.randperm(vocab, generator=generator)[:size] for size in sizes.tolist()])
    counts = torch.randint(0, 3, (len(ids),), generator=generator).float()
    strengths = (torch.rand(len(chosen), generator=generator) for _ in range(3))
    repetition, presence, frequency = strengths
    return Penalties(
        chosen, sizes.cumsum(0) - sizes, sizes, ids, counts, repetition + 0.5, presence - 0.5, frequency - 0.5
    )


def changed(logits: Guarded, changes: LogitAdjustments) -> None:
    """Checks that kernels and reference change logits equally, and that kernels write nothing else."""
    expected = logits.tensor.clone()
    reference.adjust_(expected, changes)
    adjust.adjust_(logits.tensor, changes)
    assert torch.allclose(logits.check(), expected, rtol=1e-6, atol=1e-6)  # a GPU fuses products and sums
    assert torch.equal(logits.tensor.isneginf(), expected.isneginf())


@pytest.mark.parametrize("num", [1, 111, 300])
def test_penalties_are_those_of_the_reference(num: int) -> None:
    changed(logits_of(5, 400), LogitAdjustments(penalties=penalties_of(5, 400, num)))


@pytest.mark.parametrize("num", [0, 1, 300])
def test_biases_and_banned_ids_are_those_of_the_reference(num: int) -> None:
    (rows, ids), values = pairs_of(3, 200, num), torch.randn(num)
    twice = BannedTokens(torch.cat((rows, rows[:50])), torch.cat((ids, ids[:50])))
    changed(logits_of(3, 200), LogitAdjustments(banned_tokens=twice))
    changed(logits_of(3, 200), LogitAdjustments(biases=LogitBiases(rows, ids, values)))


@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_are_those_of_the_reference(vocab: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int64).int()
    nobody = TokenMask(torch.empty(0, dtype=torch.int64), bits[:0])
    changed(logits_of(4, vocab), LogitAdjustments(masks=(TokenMask(torch.tensor([0, 3]), bits), nobody)))


def test_changes_are_made_in_the_order_of_the_reference() -> None:
    rows, ids = pairs_of(4, 64, 30)
    mask = TokenMask(torch.tensor([1]), torch.tensor([[-2, 5]], dtype=torch.int32))
    changes = LogitAdjustments(
        (mask,), BannedTokens(rows[:9], ids[:9]), LogitBiases(rows, ids, torch.randn(30)), penalties_of(4, 64, 20)
    )
    changed(logits_of(4, 64), changes)


@pytest.mark.parametrize("vocab", [40, 111, 8200])
def test_scores_are_those_of_the_reference(vocab: int) -> None:
    logits = logits_of(3, vocab).tensor
    logits[1, 5:] = -torch.inf
    logits[2, 7] = logits[2, 9] = 30.0
    pairs = torch.tensor([0, 0, 2]), torch.tensor([8, 2, 9])
    asked = ScoreRequest(torch.tensor([1, 3, 7]), torch.tensor([3, 0, 1]), *pairs, 3)
    found, wanted = scores.score(logits, asked), score_reference.score(logits, asked)
    exact = logits.double().log_softmax(1)
    assert torch.allclose(found.logprobs.double(), exact[torch.arange(3), asked.ids], atol=2e-6, rtol=1e-6)
    assert torch.allclose(found.other_logprobs.double(), exact[pairs], atol=2e-6, rtol=1e-6)
    assert torch.equal(found.ranks, wanted.ranks) and torch.equal(found.other_ranks, wanted.other_ranks)
    assert torch.equal(found.top_ids[0], wanted.top_ids[0])
    assert torch.allclose(found.top_logprobs[0], wanted.top_logprobs[0], atol=2e-6)
    assert found.top_logprobs[2, 0] == found.logprobs[2]  # of two equals, one


def test_logits_on_a_gpu_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, (rows, ids) = logits_of(3, 50).tensor, pairs_of(3, 50, 4)
    expected = logits.clone()

    def use(on: Tensor) -> tuple[Tensor, ...]:
        ops.adjust_(on, LogitAdjustments(banned_tokens=BannedTokens(rows, ids), penalties=penalties_of(3, 50, 7)))
        asked = ScoreRequest(torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2]), rows[:1], ids[:1] * 0, 2)
        return ops.score(on, asked)

    wanted = use(expected)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    for found, want in zip(use(logits), wanted, strict=True):
        assert torch.allclose(found, want, atol=1e-5)
    assert torch.allclose(logits, expected)
