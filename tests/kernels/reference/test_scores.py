"""Log probabilities, ranks and top ids, by the reference and by each instruction set's kernel, against a definition."""

import math

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.reference.scores import ScoreRequest


@pytest.fixture(params=["reference", "v3", "v4", "v4_vnni"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = builds.load(request.param) if request.param in builds.runnable() else None
    if module is None and request.param != "reference":
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(native_sampling, "MODULE", module)


def asked(ids: list[int], nums: list[int], pairs: list[tuple[int, int]] | None = None) -> ScoreRequest:
    rows, others = torch.tensor(pairs or [], dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return ScoreRequest(torch.tensor(ids), torch.tensor(nums), rows, others, max(nums))


def rank(row: Tensor, value: float) -> int:
    return 1 + int((row > value).sum())


@pytest.mark.parametrize("vocab", [20, 111, 4096, 32_003])
def test_scores_are_what_they_are_called(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    exact = logits.double().log_softmax(1)
    ids, nums, pairs = [3, 19, 0, 7, 11], [0, 20, 5, 1, 5], [(1, 2), (1, 17), (4, 0)]
    found = ops.score(logits, asked(ids, nums, pairs))
    for row, (token, num) in enumerate(zip(ids, nums, strict=True)):
        assert math.isclose(found.logprobs[row], exact[row, token], abs_tol=2e-5)
        assert found.ranks[row] == rank(logits[row], float(logits[row, token]))
        top = logits[row].topk(num)
        assert found.top_ids[row, :num].tolist() == top.indices.tolist()
        torch.testing.assert_close(found.top_logprobs[row, :num].double(), exact[row, top.indices], atol=2e-5, rtol=0)
    for at, (row, other) in enumerate(pairs):
        assert math.isclose(found.other_logprobs[at], exact[row, other], abs_tol=2e-5)
        assert found.other_ranks[at] == rank(logits[row], float(logits[row, other]))


def test_barred_ids_and_equals() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, [4, 9, 40]] = torch.tensor([1.0, 1.0, 2.0])
    found = ops.score(logits, asked([9], [4], [(0, 7), (0, 40)]))
    assert found.ranks.tolist() == [2] and found.other_ranks.tolist() == [4, 1]
    assert found.top_ids[0, :1].tolist() == [40] and set(found.top_ids[0, 1:3].tolist()) == {4, 9}
    assert found.top_logprobs[0, 3] == found.other_logprobs[0] == -math.inf
    assert math.isclose(found.logprobs[0], 1.0 - math.log(2 * math.e + math.e**2), abs_tol=1e-6)


def test_a_row_alone_scores_as_in_company() -> None:
    logits = torch.randn(33, 5000, generator=torch.Generator().manual_seed(2)) * 4
    together = ops.score(logits, asked(list(range(33)), [3] * 33))
    for row in range(33):
        alone = ops.score(logits[row : row + 1].clone(), asked([row], [3]))
        assert alone.logprobs[0] == together.logprobs[row]
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[row])
