"""What GPUs do not run is refused at start, with what they do."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.errors import ServiceError
from engine.gpu import check_gpu, check_shape
from engine.models.config import ModelConfig, read_config
from tests.oracle.checkpoints import Shape, make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return dataclasses.replace(
        read_config(make_checkpoint(tmp_path, Shape())), head_dim=128, num_heads=8, num_kv_heads=2
    )


def test_what_runs_passes(model: ModelConfig) -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        check_shape(dataclasses.replace(model, head_dim=dim), torch.bfloat16, 32, 80)
    for block_size in (1, 5, 128):
        check_shape(model, torch.float16, block_size, 90)
    check_gpu(model, torch.float64, 1000, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "dtype", "block_size", "capability", "said"),
    [
        ({}, torch.bfloat16, 32, 75, "compute capability 7.5: 8.0 or newer"),
        ({}, torch.float32, 32, 90, "torch.float32: float16, bfloat16 are supported"),
        ({"head_dim": 48}, torch.bfloat16, 32, 90, "head size 48: multiples of 16 from 64 to 256 are supported"),
        ({"head_dim": 100}, torch.bfloat16, 32, 90, "head size 100"),
        ({"head_dim": 512}, torch.bfloat16, 32, 90, "head size 512"),
        ({"num_heads": 256}, torch.bfloat16, 32, 90, "128 query heads of one kv head: up to 64 are"),
        ({}, torch.bfloat16, 256, 90, "--block-size 256: 1 to 128 are supported"),
    ],
)
def test_what_does_not_is_refused_with_what_does(
    model: ModelConfig, changes: dict[str, int], dtype: torch.dtype, block_size: int, capability: int, said: str
) -> None:
    with pytest.raises(ServiceError, match=said):
        check_shape(dataclasses.replace(model, **changes), dtype, block_size, capability)
