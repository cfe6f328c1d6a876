"""The table of models that gateways read: when it is news, and what happens if it cannot be written."""

import errno
from pathlib import Path

import pytest

from sluice_server.services.process.model_commands import (
    LoadLane,
)
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.supervisor import lane_table
from tests.services.supervisor.lane_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_change_of_the_table_is_news_once(bench: Bench) -> None:
    assert bench.lanes.table.take_news() and not bench.lanes.table.take_news()
    bench.turn(1.0)
    assert not bench.lanes.table.take_news()
    bench.serving("m0", "m1")
    bench.turn(2.0)
    assert bench.lanes.table.take_news() and not bench.lanes.table.take_news()


def test_a_table_that_cannot_be_written_on_a_full_disk_is_written_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, table: ModelTable) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(lane_table, "write_table", full)
        assert bench.ask(LoadLane(LaneEntry("c", "/c"))).lane == "m2"
        bench.turn(2.0)
    assert "m2" not in bench.states and sum("No space left on device" in line for line in bench.said) == 1
    assert bench.turn(3.0)["m2"] is LaneState.LOADING
