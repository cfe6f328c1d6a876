"""Small runs of every kernel on a GPU: `make test-gpu-sanitized` runs them under compute-sanitizer, which takes a
hundred times as long."""

import numpy as np
import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_cases import Case, CaseDevice, Sizes, disagreement
from benchmarks.gpu_command import FP8_SINCE
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged
from sluice_server.kernels.reference import definitions
from sluice_server.kernels.triton import linear16
from sluice_server.kernels.triton.attention import paged_attention
from tests.kernels.triton.harness import Pages

SMALL = Sizes((1, 3), 3000, (5,), 96, 4, 2, 64, 8, (1, 17), (128,), (1, 9), (4,), 2, 64, 32)
CASES = gpu_kernels.all_cases(SMALL, gpu_kernels.PARTS, has_fp8=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_kernels(case: Case, gpu: torch.device) -> None:
    if case.needs_fp8 and torch.cuda.get_device_capability() < FP8_SINCE:
        pytest.skip("this GPU has no fp8")
    torch.manual_seed(0)
    work = case.make(CaseDevice(gpu, torch.bfloat16))
    assert disagreement(work) <= work.tolerance


@pytest.mark.parametrize("rows", [[(1, 40), (1, 3)], [(5, 21), (33, 33)]], ids=["decode", "prefill"])
def test_attention(rows: list[tuple[int, int]], gpu: torch.device) -> None:
    counts, contexts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    pages = Pages.of(contexts.tolist(), 16, 2, 64, torch.bfloat16)
    q = torch.randn(int(counts.sum()), 4, 64, dtype=torch.bfloat16, device=gpu)
    cache, batch = pages.cache.to(gpu), Ragged.of(counts, contexts, pages.tables.numpy(), gpu)
    options = AttentionOptions(0.125)
    want = definitions.ragged_attention(q, cache, batch, options)
    assert torch.allclose(paged_attention(q, cache, batch, options).double(), want, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 70])
def test_linears_of_one_order(rows: int, gpu: torch.device) -> None:
    """Products of one part, and of several parts that are added."""
    for inputs in (96, 1100):
        x, weight = (torch.randn(num, inputs, device=gpu).bfloat16() for num in (rows, 130))
        want = x.double() @ weight.double().t()
        assert torch.allclose(linear16.linear(x, weight).double(), want, atol=0.3, rtol=2e-2)
