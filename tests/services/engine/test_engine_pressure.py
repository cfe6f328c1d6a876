"""What an engine does about memory: a real small engine, and levels that a test sets."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.pressure import CALM_S
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.engine.cache_operations import CacheOperations
from sluice_server.services.engine.gpus import GpuPressure
from sluice_server.services.engine.pressure import EnginePressure
from sluice_server.services.memory.control_group import GroupMemory
from sluice_server.services.memory.level import Level
from sluice_server.services.messages.control import ResizeCache
from sluice_server.services.telemetry import catalogue
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=8,
    threads=1,
    max_num_seqs=4,
    kv_cache_tokens=1024,
    host_cache_bytes=1 << 18,
    max_model_len=64,
    max_num_batched_tokens=64,
)
MEMORY = GroupMemory(0, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape())


class Rig:
    """An engine, its measures, and a clock."""

    def __init__(self, checkpoint: Path, config: EngineConfig = CONFIG, gpu: GpuPressure | None = None) -> None:
        model = read_config(checkpoint)
        limits = limits_of(config, model, 1 << 20)
        self.built: BuiltEngine = build_engine(config, model, checkpoint, limits, digests=lambda: Digests(b"w"))
        self.now_s = 0.0
        self.operations = CacheOperations(self.built.memory)
        self.pressure = EnginePressure(self.built, self.operations, config, lambda: self.now_s, gpu)

    @property
    def sizes(self) -> tuple[int, int]:
        assert self.built.memory is not None
        return self.built.memory.tokens, self.built.memory.num_host_slots

    async def act(self, level: Level, seconds: float = 0.0) -> tuple[int, int]:
        """Acts on a level so many seconds later; the tokens and host slots when that is done."""
        self.now_s += seconds
        self.pressure.act(level, MEMORY)
        while self.operations.is_resizing:
            await asyncio.sleep(0)
        return self.sizes


async def test_the_cache_gives_way_and_comes_back(checkpoint: Path) -> None:
    rig = Rig(checkpoint)
    scheduler = rig.built.engine.scheduler
    tokens, slots = rig.sizes
    assert tokens == 1024 and slots > 1
    assert await rig.act(Level.OK) == (tokens, slots)
    assert await rig.act(Level.WARN) == (72, slots // 2)  # one request of full length, and a block more
    assert scheduler._planner.budget == 16
    assert await rig.act(Level.CRITICAL, 1.0) == (72, 0)
    assert await rig.act(Level.OK, 1.0) == (72, 0)
    assert scheduler._planner.budget == 64
    found = [await rig.act(Level.OK, CALM_S) for _ in range(5)]
    assert found == [(328, 0), (584, 0), (840, 0), (1024, slots), (1024, slots)]
    rig.built.close()


async def test_a_gpu_that_is_short_of_memory_makes_steps_smaller_and_nothing_else(checkpoint: Path) -> None:
    free, now_s = 8 << 30, 0.0
    rig = Rig(checkpoint, gpu=GpuPressure(0.1, lambda: (free, 80 << 30), lambda: now_s))
    planner, before = rig.built.engine.scheduler._planner, rig.sizes
    assert await rig.act(Level.OK) == before and planner.budget == 64
    free = 0
    assert await rig.act(Level.OK) == before and planner.budget == 16
    free = 8 << 30
    for _ in range(20):
        now_s += 1.0
        assert await rig.act(Level.OK) == before
    assert planner.budget == 64
    rig.built.close()


async def test_open_requests_and_the_least_size_are_kept_room_for(checkpoint: Path) -> None:
    rig = Rig(checkpoint, dataclasses.replace(CONFIG, kv_cache_min_tokens=512))
    assert (await rig.act(Level.WARN))[0] == 520
    rig.built.close()
    rig = Rig(checkpoint, dataclasses.replace(CONFIG, kv_cache_min_tokens=8))
    rig.built.engine.add(EngineRequest("a", tuple(range(3, 33)), SamplingParams(max_tokens=30, ignore_eos=True)))
    assert (await rig.act(Level.WARN))[0] == 64
    while rig.built.engine.has_work:
        assert not rig.built.engine.step().failed
    rig.built.close()


async def test_what_an_operator_asked_for_is_what_it_comes_back_to(checkpoint: Path) -> None:
    rig = Rig(checkpoint)
    async for _ in rig.operations.resize(ResizeCache(512)):
        pass
    await rig.act(Level.CRITICAL)
    for _ in range(6):
        tokens, _ = await rig.act(Level.OK, CALM_S + 1)
    assert tokens == 512
    rig.built.close()


async def test_figures_say_what_is_held(checkpoint: Path) -> None:
    rig = Rig(checkpoint)
    engine = rig.built.engine
    engine.add(EngineRequest("a", tuple(range(3, 15)), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    held = rig.pressure.holds()
    assert rig.built.store is not None and held["cache"] == 2 * rig.built.store.block_bytes and held["weights"] > 0
    found = {one.metric.name: one.value for one in rig.pressure.figures()}
    assert found[catalogue.CACHE_WASTE.name] == pytest.approx(1 - 12 / 16)
    assert found[catalogue.CACHE_LEFT.name] == 3600.0
    rig.built.close()
