"""Attention of few queries in float32 vectors, which keep queries in registers or keys: the bits of a prompt's."""

import numpy as np
import pytest
import torch

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
BLOCK, CONTEXT = 16, 150  # tokens


@pytest.fixture(params=builds.KNOWN, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with each build."""
    monkeypatch.setattr(builds, "MODULE", kernels_of(request.param))


def last_of(num: int, context: int) -> AttentionMetadata:
    """The last `num` tokens of a sequence whose blocks lie in descending order."""
    tables = np.arange(-(-CONTEXT // BLOCK), dtype=np.int32)[None, ::-1].copy()
    return AttentionMetadata.build([num], [context], tables, BLOCK, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])  # query heads of a key head; six queries at a time are many
def test_a_token_has_the_bits_that_it_has_in_a_prompt(dtype: torch.dtype, dim: int, group: int) -> None:
    torch.manual_seed(0)
    kv_heads = 3
    blocks = -(-CONTEXT // BLOCK)
    cache = new_layers(blocks, 1, BLOCK, kv_heads, dim, lambda shape: torch.zeros(shape, dtype=dtype), is_whole=False)[
        0
    ]
    heads = torch.randn(CONTEXT, (group + 2) * kv_heads, dim)
    ops.rotate_and_write(
        heads, torch.ones(CONTEXT, 1, dim // 2, dtype=torch.complex64), cache, last_of(CONTEXT, CONTEXT)
    )
    q = heads[:, : group * kv_heads].contiguous()
    whole = ops.paged_attention(q, cache, last_of(CONTEXT, CONTEXT), dim**-0.5, None)
    for end in (1, 31, 32, 33, 64, 97, CONTEXT):
        alone = ops.paged_attention(q[end - 1 : end], cache, last_of(1, end), dim**-0.5, None)
        assert torch.equal(alone[0], whole[end - 1]), end
