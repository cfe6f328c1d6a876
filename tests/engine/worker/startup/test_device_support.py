"""Features that GPUs do not support are refused at start, with the supported ones."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.engine.worker.startup.device_support import check_gpu, check_shape, check_step
from sluice_server.engine.worker.startup.formats import Formats
from tests.oracle.checkpoints import Shape, make_checkpoint

FP8 = torch.float8_e4m3fn


def of(dtype: torch.dtype, weights: str = "", cache: torch.dtype | None = None) -> Formats:
    return Formats(dtype, weights, cache or dtype)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return dataclasses.replace(
        read_config(make_checkpoint(tmp_path, Shape())), head_dim=128, num_heads=8, num_kv_heads=2
    )


def test_what_runs_passes(model: ModelConfig) -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        check_shape(dataclasses.replace(model, head_dim=dim), of(torch.bfloat16), 32, 80)
    for block_size in (1, 5, 128):
        check_shape(model, of(torch.float16), block_size, 90)
    check_shape(model, of(torch.bfloat16, "w8a8", torch.int8), 32, 80)
    check_shape(model, of(torch.bfloat16, "fp8", FP8), 32, 89)
    check_gpu(model, of(torch.float64), 1000, torch.device("cpu"))


def test_steps_of_more_tokens_than_a_launch_has_programs_are_refused() -> None:
    check_step(65_535, torch.device("cuda"))
    check_step(1_000_000, torch.device("cpu"))
    said = "--max-num-batched-tokens: 65536 tokens a step on cuda: at most 65535 are supported"
    with pytest.raises(ServiceError, match=said):
        check_step(65_536, torch.device("cuda"))


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
    model: ModelConfig, changes: dict[str, Any], dtype: torch.dtype, block_size: int, capability: int, said: str
) -> None:
    with pytest.raises(ServiceError, match=said):
        check_shape(dataclasses.replace(model, **changes), of(dtype), block_size, capability)


@pytest.mark.parametrize(
    ("formats", "capability", "said"),
    [
        (of(torch.bfloat16, cache=FP8), 80, "--kv-cache-dtype fp8 needs .* 8.9 or newer .* this one is 8.0: take int8"),
        (of(torch.bfloat16, "fp8"), 86, "--quantization fp8 needs .* 8.9 or newer .* this one is 8.6: take int8"),
    ],
)
def test_fp8_needs_a_gpu_that_has_it(model: ModelConfig, formats: Formats, capability: int, said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        check_shape(model, formats, 32, capability)


@pytest.mark.parametrize("weights", ["w8a8", "fp8", "stored"])
def test_rows_too_wide_to_be_rounded_are_refused(model: ModelConfig, weights: str) -> None:
    wide = dataclasses.replace(model, intermediate_size=53_248)
    check_shape(wide, of(torch.bfloat16, "int8"), 32, 90)
    formats = of(torch.bfloat16, "" if weights == "stored" else weights)
    if weights == "stored":
        wide = dataclasses.replace(wide, stored=StoredForm("fp8"))
    with pytest.raises(ServiceError, match="rounded activations of 53248 inputs: up to 32768 are supported"):
        check_shape(wide, formats, 32, 90)


def test_the_size_of_a_step_is_the_device_s_where_settings_leave_it_open() -> None:
    names = ("max_num_seqs", "max_num_batched_tokens", "max_num_pooling_tokens")
    sizes = [[getattr(EngineConfig().sized(device), name) for name in names] for device in ("cpu", "cuda")]
    assert sizes == [[64, 512, 8], [256, 2048, 64]]
    own = EngineConfig(max_num_seqs=3, max_num_batched_tokens=5, max_num_pooling_tokens=2)
    assert own.sized("cuda") == own
