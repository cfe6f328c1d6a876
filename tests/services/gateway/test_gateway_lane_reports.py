"""What a gateway tells its supervisor of its lanes, and when it says it again."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway.lane_reports import LaneReports
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.process.supervised import READY_FD
from sluice_server.services.process.watched import WatchedFile
from tests.services.gateway.fake_ring import generation, unary_request
from tests.services.gateway.models.test_two_lanes import Two, answering, two

SERVICE = ServiceConfig(models="models.toml")


class Heard:
    """What a supervisor would read, and a table that the test may change."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        entries = {"m0": LaneEntry("toy", "/toy"), "m1": LaneEntry("other", "/other")}
        self.table = WatchedFile((), lambda: ModelTable(entries, "toy"))

    def reports(self, both: Two) -> LaneReports:
        return LaneReports(both.rig.gateway, SERVICE, "gateway-0", self.table)

    def lines(self, kind: str = "lanes") -> list[str]:
        """What was said of this kind since the last call."""
        try:
            said = os.read(self._fd, 4096).decode().splitlines()
        except BlockingIOError:
            return []
        return [line for line in said if line.startswith(kind)]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setenv(READY_FD, str(write))
    yield Heard(read)
    os.close(read)
    os.close(write)


async def test_what_has_not_changed_is_said_once(heard: Heard) -> None:
    async with two() as both:
        reports = heard.reports(both)
        reports.tell()
        reports.tell()
        assert heard.lines() == ["lanes gateway-0 m0,m1;;;"] and reports.news.number == 1


async def test_a_lane_was_busy_if_a_request_came_and_ended_meanwhile(heard: Heard) -> None:
    async with two() as both:
        reports = heard.reports(both)
        reports.tell()
        answering(both.ring, "a")
        await both.rig.stub.Generate(unary_request(model="other"))
        reports.tell()
        reports.tell()
        assert heard.lines()[1:] == ["lanes gateway-0 m0,m1;;m1;", "lanes gateway-0 m0,m1;;;"]


async def test_the_start_of_a_lane_has_all_said_again(heard: Heard) -> None:
    async with two() as both:
        reports = heard.reports(both)
        reports.tell()
        lanes = {"m0": LaneEntry("toy", "/toy"), "m1": LaneEntry("other", "/other", starts=1)}
        heard.table.value = ModelTable(lanes, "toy")
        reports.tell()
        assert heard.lines() == ["lanes gateway-0 m0,m1;;;"] * 2


async def test_a_lane_that_leaves_is_drained_once_it_has_nothing_open(heard: Heard) -> None:
    async with two() as both:
        reports = heard.reports(both)
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        submit = await both.ring.next_submit()
        both.lane.is_leaving, both.lane.leaves = True, 3
        reports.tell()
        reports.tell()
        assert heard.lines()[-1] == "lanes gateway-0 m0,m1;;m1;"
        both.ring.play(*generation(submit, ["a"]))
        await call
        reports.tell()
        assert heard.lines() == ["lanes gateway-0 m0,m1;m1@3;;"]


async def test_it_says_that_it_serves_once_although_the_default_model_has_failed(heard: Heard) -> None:
    async with two() as both:
        both.rig.ring.answers_probes = False
        both.rig.lane.lost()
        reports = heard.reports(both)
        reports.tell()
        assert heard.lines("ready") == []
        heard.table.value = ModelTable({"m0": LaneEntry("toy", "/toy", state=LaneState.FAILED)}, "toy")
        reports.tell()
        reports.tell()
        [line] = heard.lines("ready")
        assert line.startswith("ready gateway-0 127.0.0.1:") and line.endswith(" none")
