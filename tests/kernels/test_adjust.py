"""Penalties against Hugging Face and vLLM's definition; biases and bars touch what they name and nothing else."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kernels.adjust import bar_, bias_, mask_, penalise_

VOCAB = 40


def pairs(tokens: dict[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, id) of distinct ids."""
    found = [(row, token) for row, ids in tokens.items() for token in sorted(set(ids))]
    return torch.tensor([row for row, _ in found]), torch.tensor([token for _, token in found])


def test_repetition_is_hugging_faces() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, VOCAB) * 3, {0: [1, 5, 5, 9], 1: [2, 39, 7, 7]}
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(list(tokens.values())), logits.clone())
    rows, ids = pairs(tokens)
    zero = torch.zeros(len(ids))
    penalise_(logits, rows, ids, zero, torch.full_like(zero, 1.3), zero, zero)
    assert torch.equal(logits, want)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    ids, counts = torch.tensor([3, 4, 5]), torch.tensor([0.0, 1.0, 3.0])  # the first is in the prompt only
    one = torch.ones(3)
    penalise_(logits, torch.zeros(3, dtype=torch.int64), ids, counts, one, 0.5 * one, 0.25 * one)
    assert logits[0, 3:6].tolist() == [0.0, -0.75, -1.25]
    assert not logits[0, :3].any() and not logits[0, 6:].any()


def test_barred_ids_stay_barred() -> None:
    logits = torch.zeros(2, VOCAB)
    mask_(logits, torch.tensor([0]), torch.tensor([[0b110, 0]], dtype=torch.int32))
    bar_(logits, torch.tensor([0, 0]), torch.tensor([2, 2]))
    bias_(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 1, 7]), torch.tensor([100.0, 5.0, 1.0]))
    assert logits[0].isneginf().sum() == VOCAB - 1 and logits[0, 1] == 5.0
    assert logits[1, 7] == 1.0 and logits[1].sum() == 1.0


@pytest.mark.parametrize("vocab", [40, 64, 111])
@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]])
def test_masks_bar_what_has_no_bit(vocab: int, rows: list[int]) -> None:
    torch.manual_seed(0)
    logits, may = torch.randn(3, vocab), torch.rand(len(rows), -(-vocab // 32) * 32) < 0.5
    bits = torch.from_numpy(np.packbits(may.numpy(), axis=1, bitorder="little").view(np.int32))
    want = logits.clone()
    for row, allowed in zip(rows, may, strict=True):
        want[row] = want[row].where(allowed[:vocab], -torch.inf)
    mask_(logits, torch.tensor(rows), bits)
    assert torch.equal(logits, want)
