"""Changes of logits, log probabilities and acceptance of drafts: equal to their twins, and nothing else touched."""

import pytest
import torch
from torch import Tensor

from kernels import adjust as twin
from kernels import gpu, ops, speculation
from kernels import log_probs as scores
from kernels.adjust import Bars, Biases, Changes, Mask, Penalties
from kernels.scores import Asked
from kernels.triton import adjust, log_probs
from kernels.triton import speculation as drafts_kernel
from tests.kernels.triton.harness import Guarded, is_poison

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


@pytest.mark.parametrize("num", [1, 111, 300])
def test_penalties_are_the_twins(num: int) -> None:
    logits = logits_of(3, 200)
    expected, (rows, ids) = logits.tensor.clone(), pairs_of(3, 200, num)
    counts = torch.randint(0, 3, (num,)).float()
    columns = (counts, torch.rand(num) + 0.5, torch.rand(num) - 0.5, torch.rand(num) - 0.5)
    twin.penalise_(expected, rows, ids, *columns)
    adjust.penalise_(logits.tensor, rows, ids, *columns)
    assert torch.allclose(logits.check(), expected, rtol=1e-6, atol=1e-6)  # a GPU fuses products and sums


@pytest.mark.parametrize("num", [0, 1, 300])
def test_biases_and_bars_are_the_twins(num: int) -> None:
    logits = logits_of(3, 200)
    expected, (rows, ids), values = logits.tensor.clone(), pairs_of(3, 200, num), torch.randn(num)
    twin.bias_(expected, rows, ids, values)
    adjust.bias_(logits.tensor, rows, ids, values)
    twice = torch.cat((rows, rows[:50])), torch.cat((ids, ids[:50]))
    assert torch.equal(logits.check(), expected)
    twin.bar_(expected, *twice)
    adjust.bar_(logits.tensor, *twice)
    assert torch.equal(logits.check(), expected)


@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_are_the_twins(vocab: int) -> None:
    logits, rows = logits_of(4, vocab), torch.tensor([0, 3])
    expected, bits = logits.tensor.clone(), torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int64)
    twin.mask_(expected, rows, bits.int())
    adjust.mask_(logits.tensor, rows, bits.int())
    adjust.mask_(logits.tensor, rows[:0], bits[:0].int())
    assert torch.equal(logits.check(), expected)


@pytest.mark.parametrize(("vocab", "num_ranked"), [(40, 0), (111, 3), (8200, 1)])
def test_log_probabilities_and_ranks_are_the_twins(vocab: int, num_ranked: int) -> None:
    logits = logits_of(3, vocab).tensor
    logits[1, 5:] = -torch.inf
    logits[2, 7] = logits[2, 9] = 30.0
    ids = torch.tensor([[1, 8, 2], [0, 9, 4], [7, 9, 11]])
    exact = logits.double().log_softmax(1).gather(1, ids)
    found, ranks = log_probs.log_probs(logits, ids, num_ranked)
    assert torch.allclose(found.double(), exact, atol=2e-6, rtol=1e-6)
    assert torch.equal(ranks, scores.log_probs(logits, ids, num_ranked)[1])
    assert log_probs.log_probs(logits[:0], ids[:0], num_ranked)[0].shape == (0, 3)


def accepted(sampled: list[int], drafts: list[int]) -> tuple[list[int], int]:
    """The definition."""
    num = 0
    while num < len(drafts) and drafts[num] >= 0 and drafts[num] == sampled[num]:
        num += 1
    return sampled[: num + 1] + [-1] * (len(drafts) - num), num


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("rows", [1, 4, 41])
def test_drafts_stand_up_to_the_first_that_was_not_sampled(num_drafts: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    sampled = torch.randint(0, 2, (rows, 1 + num_drafts), generator=generator)
    drafts = torch.randint(0, 2, (rows, num_drafts), generator=generator)
    for row in range(rows):  # every length of drafts; behind them, what was sampled may be anything
        drafts[row, row % (num_drafts + 1) :] = speculation.NOTHING
    sampled[rows // 2, num_drafts // 2] = -1  # a row of no usable number
    expected = [accepted(*row) for row in zip(sampled.tolist(), drafts.tolist(), strict=True)]
    for accept in (speculation.accept, drafts_kernel.accept):
        tokens, num = accept(sampled, drafts)
        assert list(zip(tokens.tolist(), num.tolist(), strict=True)) == expected


def test_what_is_accepted_is_never_padding() -> None:
    sampled = torch.full((2, 4), -1)
    for accept in (speculation.accept, drafts_kernel.accept):
        assert accept(sampled, sampled[:, 1:])[1].tolist() == [0, 0]
        assert accept(sampled[:0], sampled[:0, 1:])[1].tolist() == []


def test_logits_on_a_gpu_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, (rows, ids) = logits_of(3, 50), pairs_of(3, 50, 4)
    expected, one = logits.tensor.clone(), torch.ones(4)

    def change(on: Tensor) -> tuple[Tensor, ...]:
        mask = Mask(torch.tensor([1]), torch.tensor([[-2, -1]], dtype=torch.int32))
        penalties = Penalties(rows[:1], torch.tensor([4]), (ids + 2) % 50, one, one[:1] + 1, one[:1], one[:1])
        ops.adjust_(on, Changes((mask,), Bars(rows, ids), Biases(rows, (ids + 1) % 50, one), penalties))
        asked = Asked(ids[:1], torch.tensor([2]), torch.tensor([0]), ids[1:2], 2)
        return *ops.score(on[:1], asked), *ops.accept(ids[None], ids[None, :-1])

    wanted = change(expected)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    for found, want in zip(change(logits.tensor), wanted, strict=True):
        assert torch.allclose(found, want)
    assert torch.equal(logits.tensor, expected) and not is_poison(logits.tensor).any()
