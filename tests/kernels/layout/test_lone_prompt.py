"""A prompt that is alone in its step is laid out as beside others."""

import numpy as np
import pytest
import torch

from sluice_server.kernels.layout.metadata import FEW, AttentionMetadata

SIZE = 4
TABLES = np.random.default_rng(0).permutation(160).reshape(2, 80).astype(np.int32)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("num", "context"), [(2, 2), (9, 9), (3, 14), (16, 16), (FEW, FEW + 9), (FEW + 1, FEW + 6)])
def test_a_prompt_alone_is_laid_out_as_beside_another(num: int, context: int) -> None:
    """Positions, slots and indices of the first of two rows are those of this row alone, of the same types."""
    alone = AttentionMetadata.build([num], [context], TABLES[:1], SIZE, CPU)
    beside = AttentionMetadata.build([num, 5], [context, 5], TABLES, SIZE, CPU)
    assert alone.positions.tolist() == list(range(context - num, context))
    for name in ("positions", "write_slots"):
        own, of_both = getattr(alone, name), getattr(beside, name)
        assert torch.equal(own, of_both[:num]) and own.dtype == of_both.dtype and own.is_contiguous()
    for name in ("counts", "contexts"):
        assert getattr(alone, name).tolist() == getattr(beside, name)[:1].tolist()
        assert getattr(alone, name).dtype == getattr(beside, name).dtype
    assert torch.equal(alone.last_tokens, beside.last_tokens[:1])
    assert np.array_equal(alone.firsts, beside.firsts[:1]) and alone.firsts.dtype == beside.firsts.dtype
