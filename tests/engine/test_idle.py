"""An idle engine measures how many threads pay, without disturbing requests or the cache."""

import dataclasses
import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.host import compute_threads
from sluice_server.engine.worker.host.cores import Cores
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=8, kv_cache_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape())


def built_by_a_clock(checkpoint: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> BuiltEngine:
    """An engine of two cores with a clock that advances by a second each time it is read."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(compute_threads, "find_cores", lambda: Cores(2, None))
    model = read_config(checkpoint)
    return build_engine(config, model, checkpoint, limits_of(config, model, 1 << 20))


def measured(built: BuiltEngine) -> int:
    """The number of layers computed in a long time without requests."""
    before = built.engine.runner.progress
    for _ in range(2000):
        built.engine.idle()
    return built.engine.runner.progress - before


def test_measuring_leaves_what_requests_have_cached(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[list[Tensor]] = []
    new_cache = Model.new_cache

    def kept(model: Model, num_blocks: int, block_size: int, dtype: torch.dtype, num_layers: int = 0) -> list[Tensor]:
        caches.append(new_cache(model, num_blocks, block_size, dtype, num_layers))
        return caches[-1]

    monkeypatch.setattr(Model, "new_cache", kept)
    built = built_by_a_clock(checkpoint, CONFIG, monkeypatch)
    built.engine.add(EngineRequest("a", tuple(range(1, 60)), SamplingParams(max_tokens=4, ignore_eos=True)))
    while built.engine.has_work:
        built.engine.step()
    before = [layer.clone() for layer in caches[0]]
    assert all(layer.abs().amax() > 0 for layer in before)
    assert measured(built) > 0
    assert all(was.equal(layer) for was, layer in zip(before, caches[0], strict=True))


def test_a_number_that_was_asked_for_is_not_measured(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_by_a_clock(checkpoint, dataclasses.replace(CONFIG, threads=2), monkeypatch)
    assert measured(built) == 0
    assert (built.computing.threads, built.computing.threads_because) == (2, "--threads")
