"""Arrays that are copied to a GPU: begun, not waited for, and through memory of their own."""

from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.uploads import uploaded
from tests.pretended_gpu.cuda import pretend


@pytest.mark.parametrize(
    "values",
    [
        np.arange(40_000, dtype=np.int32).reshape(4, -1),
        np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
        np.array([True, False]),
        np.empty((0, 3), dtype=np.int64),
        np.array(7, dtype=np.int64),
    ],
)
def test_a_copy_is_on_its_way_while_the_array_is_used_again(values: "np.ndarray[Any, Any]") -> None:
    wanted, given = values.copy(), values.copy() if values.flags.c_contiguous else values
    with pretend() as gpu:
        begun = len(gpu.memory.waits)
        found = uploaded(given, torch.device("cuda", 0))
        assert len(gpu.memory.waits) == begun
        given[...] = 1
        assert found.shape == wanted.shape and np.array_equal(found.cpu().numpy(), wanted)


def test_a_cpu_reads_the_array_itself() -> None:
    values = np.zeros(3)
    found = uploaded(values, torch.device("cpu"))
    values[1] = 5
    assert found.tolist() == [0, 5, 0]
