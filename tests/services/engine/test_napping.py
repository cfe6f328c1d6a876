"""An engine whose model sleeps at level 1: when its cache is empty, what is said of it, and what fills it again."""

import asyncio
from pathlib import Path

import pytest

from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.services.config import ServiceConfig
from sluice_server.services.engine.napping import Napping, table_of
from sluice_server.services.memory.level import Level
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, write_table
from sluice_server.services.process.supervised import SUPERVISOR_PID
from tests.services.engine.test_engine_pressure import MEMORY, Rig, checkpoint

__all__ = ["checkpoint"]


class Nap:
    """An engine of the lane m1, and the table that it follows."""

    def __init__(self, checkpoint: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = Rig(checkpoint)
        self.said: list[bool] = []
        self.num_open = 0
        self._directory = directory
        self.becomes(LaneState.READY)
        monkeypatch.setenv(SUPERVISOR_PID, "1")
        table = table_of(ServiceConfig(heartbeat_dir=str(directory)))
        assert table is not None
        self.napping = Napping("m1-engine-0", table, self.rig.operations, lambda: self.num_open, self.said.append)

    def becomes(self, state: LaneState) -> None:
        write_table(self._directory, ModelTable({"m1": LaneEntry("b", "/b", state=state)}))

    async def looks(self) -> tuple[int, int]:
        """Looks until nothing changes; the tokens and host slots then."""
        self.napping.look()
        while self.rig.operations._task is not None and not self.rig.operations._task.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.napping.look()
        return self.rig.sizes


@pytest.fixture
def nap(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nap:
    return Nap(checkpoint, tmp_path, monkeypatch)


async def test_the_cache_is_empty_while_the_model_naps(nap: Nap) -> None:
    full = nap.rig.sizes
    assert await nap.looks() == full and not nap.said
    nap.becomes(LaneState.NAPPING)
    assert await nap.looks() == (8, 0) and nap.said == [True]
    nap.becomes(LaneState.READY)
    assert await nap.looks() == full and nap.said == [True, False]


async def test_a_request_that_comes_first_finds_the_whole_cache(nap: Nap) -> None:
    full = nap.rig.sizes
    nap.becomes(LaneState.NAPPING)
    await nap.looks()
    nap.napping.wake()
    assert nap.rig.sizes == full and nap.said == [True, False]
    nap.num_open = 1
    assert await nap.looks() == full  # the table has not changed yet
    nap.num_open = 0
    assert await nap.looks() == (8, 0)


async def test_a_request_in_the_middle_of_emptying_finds_the_whole_cache(nap: Nap) -> None:
    full = nap.rig.sizes
    nap.becomes(LaneState.NAPPING)
    nap.napping.look()
    nap.napping.wake()
    nap.becomes(LaneState.READY)
    assert await nap.looks() == full and not nap.said


async def test_what_is_known_of_memory_changes_no_cache_that_is_to_be_empty(nap: Nap) -> None:
    nap.becomes(LaneState.NAPPING)
    await nap.looks()
    for seconds in (0.0, 100.0, 200.0):
        nap.rig.now_s = seconds
        nap.rig.pressure.act(Level.OK, MEMORY)
    assert nap.rig.sizes == (8, 0)


async def test_tokens_are_those_of_before(nap: Nap) -> None:
    engine, params = nap.rig.built.engine, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def generated(name: str) -> list[int]:
        engine.add(EngineRequest(name, tuple(range(3, 40)), params))
        found: list[int] = []
        while engine.has_work:
            found += [token for event in engine.step().sampled for token in event.token_ids]
        return found

    before = generated("a")
    assert engine.scheduler.cache.stats.hit_tokens == 0
    nap.becomes(LaneState.NAPPING)
    await nap.looks()
    engine.scheduler.cache.check([])
    nap.napping.wake()
    assert generated("b") == before
    engine.scheduler.cache.check([])


def test_an_engine_without_a_supervisor_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERVISOR_PID, raising=False)
    write_table(tmp_path, ModelTable())
    assert table_of(ServiceConfig(heartbeat_dir=str(tmp_path))) is None
