"""Changes of logits, by the reference and by each instruction set's kernel: penalties as Hugging Face and vLLM define
them; masks, bans and biases change only the ids they name."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.reference.adjust import (
    BannedTokens,
    LogitAdjustments,
    LogitBiases,
    Penalties,
    TokenMask,
    adjust_,
)
from tests.kernels.reference.test_sampling import rows_of

VOCAB = 40


@pytest.fixture(params=["reference", "v3", "v4", "v4_vnni"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = builds.load(request.param) if request.param in builds.runnable() else None
    if module is None and request.param != "reference":
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(native_sampling, "MODULE", module)


def change(logits: Tensor, changes: LogitAdjustments) -> list[int]:
    """Changes logits in place and returns the greedy tokens. Drawing may leave what masks forbid as it is."""
    ids = ops.choose(logits, rows_of(len(logits), 0.0, 0, 1.0, 0.0), changes, None).ids
    adjust_(logits, LogitAdjustments(changes.masks))
    return ids.tolist()


def penalties(
    tokens: list[list[int]], counts: list[float], strengths: list[tuple[float, float, float]]
) -> LogitAdjustments:
    """Random penalties on distinct ids of each row, from row 0 on."""
    ids = [sorted(set(own)) for own in tokens]
    columns = torch.tensor(strengths).T.contiguous()
    sizes = torch.tensor([len(own) for own in ids])
    flat = torch.tensor([one for own in ids for one in own])
    firsts = sizes.cumsum(0) - sizes
    return LogitAdjustments(
        penalties=Penalties(torch.arange(len(ids)), firsts, sizes, flat, torch.tensor(counts), *columns)
    )


def test_repetition_is_hugging_faces() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, VOCAB) * 3, [[1, 5, 5, 9], [2, 39, 7, 7]]
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(tokens), logits.clone())
    change(logits, penalties(tokens, [0.0] * 6, [(1.3, 0.0, 0.0)] * 2))
    assert torch.equal(logits, want)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)  # the first of the ids is in the prompt only
    change(logits, penalties([[3, 4, 5]], [0.0, 1.0, 3.0], [(1.0, 0.5, 0.25)]))
    assert logits[0, 3:6].tolist() == [0.0, -0.75, -1.25]
    assert not logits[0, :3].any() and not logits[0, 6:].any()


def test_what_is_counted_may_lie_anywhere() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    (together,), apart = [penalties([[3, 4], [5], []], [1.0, 2.0, 3.0], [(1.2, 0.5, 0.25)] * 3)], logits.clone()
    found = together.penalties
    assert found is not None
    ids, counts = torch.tensor([9, 5, 9, 3, 4, 9]), torch.tensor([9.0, 3.0, 9.0, 1.0, 2.0, 9.0])
    change(apart, LogitAdjustments(penalties=found._replace(firsts=torch.tensor([3, 1, 6]), ids=ids, counts=counts)))
    change(logits, together)
    assert torch.equal(apart, logits)


def test_barred_ids_stay_barred() -> None:
    logits = torch.zeros(2, VOCAB)
    mask = TokenMask(torch.tensor([0]), torch.tensor([[0b110, 0]], dtype=torch.int32))
    banned_tokens = BannedTokens(torch.tensor([0, 0]), torch.tensor([2, 2]))
    biases = LogitBiases(torch.tensor([0, 0, 1]), torch.tensor([2, 1, 7]), torch.tensor([100.0, 5.0, 1.0]))
    assert change(logits, LogitAdjustments((mask,), banned_tokens, biases)) == [1, 7]
    assert logits[0].isneginf().sum() == VOCAB - 1 and logits[0, 1] == 5.0
    assert logits[1, 7] == 1.0 and logits[1].sum() == 1.0


@pytest.mark.parametrize("vocab", [7, 40, 64, 111])
@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]])
def test_masks_bar_what_has_no_bit(vocab: int, rows: list[int]) -> None:
    torch.manual_seed(0)
    logits, may = torch.randn(3, vocab), torch.rand(len(rows), -(-vocab // 32) * 32) < 0.5
    bits = torch.from_numpy(np.packbits(may.numpy(), axis=1, bitorder="little").view(np.int32))
    want = logits.clone()
    for row, allowed in zip(rows, may, strict=True):
        want[row] = want[row].where(allowed[:vocab], -torch.inf)
    assert change(logits, LogitAdjustments((TokenMask(torch.tensor(rows), bits),))) == want.argmax(1).tolist()
    assert torch.equal(logits, want)


def random_changes(rows: int, vocab: int) -> LogitAdjustments:
    """All kinds of changes at once, on most rows."""
    rng = np.random.default_rng(rows)
    some = np.flatnonzero(rng.random(rows) < 0.7)
    ids = [np.unique(rng.integers(vocab, size=9)) for _ in some]
    flat, where = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.repeat(some, [len(own) for own in ids]))
    bits = rng.integers(-(2**31), 2**31 - 1, size=(len(some), -(-vocab // 32)), dtype=np.int32)
    chosen, counts = torch.from_numpy(some), torch.from_numpy(rng.integers(0, 4, size=len(flat)).astype(np.float32))
    strengths = torch.from_numpy(
        rng.uniform([1.0, -1.0, -1.0], [2.0, 1.0, 1.0], size=(len(some), 3)).astype(np.float32)
    )
    sizes = torch.tensor([len(own) for own in ids])
    return LogitAdjustments(
        (TokenMask(chosen, torch.from_numpy(bits)),),
        BannedTokens(where[::3].contiguous(), flat[::3].contiguous()),
        LogitBiases(where, flat, counts - 1.5),
        Penalties(chosen, sizes.cumsum(0) - sizes, sizes, flat, counts, *strengths.T.contiguous()),
    )


@pytest.mark.parametrize("vocab", [17, 500, 4096])
def test_all_at_once_is_as_the_reference_has_it(vocab: int) -> None:
    logits: Tensor = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    want, changes = logits.clone(), random_changes(20, vocab)
    adjust_(want, changes)
    assert change(logits, changes) == want.argmax(1).tolist()
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits.isneginf(), want.isneginf()) and not torch.equal(logits, logits.relu())
