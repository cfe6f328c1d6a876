"""The watch of a process: what it calls, says and counts."""

import asyncio
import logging

import pytest

from sluice_server.services.memory import watch as watch_module
from sluice_server.services.memory.control_group import ControlGroup, GroupMemory
from sluice_server.services.memory.level import Level
from sluice_server.services.memory.watch import MIB, MemoryWatch
from sluice_server.services.telemetry import catalogue


class FakeGroup(ControlGroup):
    """A group whose use a test sets, in MiB of 1,000."""

    def __init__(self) -> None:
        self.used = 100
        self.fault: Exception | None = None

    def read(self) -> GroupMemory:
        if self.fault is not None:
            raise self.fault
        return GroupMemory(self.used * MIB, 1000 * MIB, oom_kills=3)

    def pressure(self) -> float:
        return 0.25


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    monkeypatch.setattr(watch_module, "give_back", lambda: None)
    return FakeGroup()


def test_each_sample_is_acted_on_and_each_change_is_one_line(
    group: FakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    watch = MemoryWatch(0.1, group, lambda: now[0], lambda: 300 * MIB)
    acted: list[Level] = []
    watch.act = lambda level, memory: acted.append(level)
    watch.holds = lambda: {"weights": 200 * MIB, "cache": 40 * MIB, "host_tier": 0}
    with caplog.at_level(logging.INFO):
        for used in (100, 910, 915, 970, *[300] * 40):
            group.used = used
            now[0] += 0.5
            watch.look()
    assert acted[:4] == [Level.OK, Level.WARN, Level.WARN, Level.CRITICAL] and acted[-1] is Level.OK
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        "memory is WARN",
        "memory is CRITICAL",
        "memory is WARN",
        "memory is OK",
    ]
    assert "910 of 1000 MiB of the control group" in lines[0]
    assert "weights 200 MiB, cache 40 MiB, other 60 MiB" in lines[0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2 + [logging.INFO] * 2


def test_figures(group: FakeGroup) -> None:
    watch = MemoryWatch(0.1, group, lambda: 0.0, lambda: 300)
    watch.holds = lambda: {"cache": 200}
    found = {(one.metric.name, one.labels): one.value for one in watch.figures()}
    assert found[catalogue.MEMORY.name, ("cache",)] == 200 and found[catalogue.MEMORY.name, ("other",)] == 100
    assert found[catalogue.GROUP_MEMORY.name, ("limit",)] == 1000 * MIB
    assert found[catalogue.MEMORY_LEVEL.name, ()] == 0 and found[catalogue.OOM_KILLS.name, ()] == 3
    assert found[catalogue.MEMORY_STALLED.name, ()] == 0.25 and found[catalogue.MEMORY_LEFT.name, ()] == 3600.0


async def test_a_failure_of_the_watch_ends_nothing(group: FakeGroup, caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch(0.1, group)
    group.fault = ValueError("broken")
    watch.begin()
    while "looking after the memory failed" not in caplog.text:
        await asyncio.sleep(0)
    assert "ValueError: broken" in caplog.text
    await watch.close()
