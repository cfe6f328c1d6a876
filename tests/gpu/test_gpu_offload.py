"""Weights of layers in memory of the host, on a GPU: the same tokens in less memory of the device."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.worker.startup.formats import choose_formats
from sluice_server.engine.worker.startup.planned import layer_bytes
from tests.gpu.test_gpu_engine import CONFIG, made, run


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_tokens_are_equal_in_less_memory(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = made(tmp_path, "1B")
    config, model = dataclasses.replace(CONFIG, **changes), read_config(directory)
    sizes = layer_bytes(directory, model, choose_formats(config, torch.device("cuda")))
    found, used = list[dict[str, list[int]]](), list[int]()
    for num_layers in (0, len(sizes) // 2, len(sizes)):
        own = dataclasses.replace(config, weights_offload_bytes=sum(sizes[:num_layers]))
        before = torch.cuda.memory_allocated()
        engine = build_engine(own, model, directory, limits_of(own, model, 1 << 20)).engine
        gc.collect()
        used.append(torch.cuda.memory_allocated() - before)
        found.append(run(engine, 6))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert found[0] == found[1] == found[2]
    # Of the bytes planned; 4 bits are planned as five, and their scales stay.
    least = 0.75 if config.quantization == "int4" else 0.9
    for num_layers, size in zip((len(sizes) // 2, len(sizes)), used[1:], strict=True):
        assert used[0] - size > least * (num_layers - 2) * sizes[0]
