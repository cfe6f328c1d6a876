"""The models of a service that come and go: what is started, written, said and ended, and when."""

from pathlib import Path

import pytest

from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.process.model_commands import (
    LoadLane,
    NameModels,
    UnloadLane,
)
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.supervisor.lane import SELDOM_S
from tests.services.supervisor.lane_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_models_that_sleep_at_the_start_are_in_the_table_from_then_on(tmp_path: Path) -> None:
    entries = {"m0": LaneEntry("a", "/a"), "m1": LaneEntry("b", "/b", state=LaneState.SLEEPING)}
    assert Bench(tmp_path, ModelTable(entries, "a")).states == {"m0": LaneState.LOADING, "m1": LaneState.SLEEPING}


def test_a_model_is_ready_once_every_gateway_says_so(bench: Bench) -> None:
    bench.serving("m0", gateways={"gateway-0"})
    assert set(bench.turn(1.0).values()) == {LaneState.LOADING} and not bench.lanes.is_settled
    bench.serving("m0", "m1")
    assert set(bench.turn(2.0).values()) == {LaneState.READY} and bench.lanes.is_settled
    assert bench.said == [f"sluice: the model {name} serves after 2.00 s" for name in "ab"]


def test_a_broken_model_is_started_more_and_more_seldom_and_comes_back(bench: Bench) -> None:
    bench.serving("m0", "m1")
    bench.turn(1.0)
    assert bench.ends("m1-engine-0", 10.0) == 10.0 and bench.states["m1"] is LaneState.LOADING
    waits = [(bench.ends("m1-engine-0", at) or 0.0) - at for at in (20.0, 40.0, 80.0, 160.0, 320.0, 700.0)]
    assert waits == [*SELDOM_S, SELDOM_S[-1]]
    assert bench.table.lanes["m1"].state is LaneState.FAILED and bench.table.lanes["m1"].why == "m1-engine-0 ended"
    assert bench.states["m0"] is LaneState.READY and bench.lanes.is_settled and not bench.dismissed
    bench.serving("m0", "m1")
    assert bench.turn(900.0)["m1"] is LaneState.READY and bench.table.lanes["m1"].why == ""
    assert bench.ends("m1-engine-0", 2000.0) == 2000.0


def test_a_stale_word_of_a_gateway_does_not_make_a_lane_ready(bench: Bench) -> None:
    bench.serving("m0", "m1")
    bench.turn(1.0)
    bench.ends("m1-engine-0", 10.0)
    assert bench.turn(10.1)["m1"] is LaneState.LOADING
    bench.serving("m0", "m1")
    bench.lanes.reports.gateway_ended("gateway-1")
    bench.ends("m1-engine-0", 11.0)
    bench.serving("m0", "m1", gateways={"gateway-0"})
    assert bench.turn(12.0)["m1"] is LaneState.FAILED


def test_a_model_that_starts_beside_one_that_serves_takes_less_of_the_processors(bench: Bench) -> None:
    assert not any(ASIDE in child.child.environment for child in bench.children.values())
    bench.serving("m0")
    bench.turn(1.0)
    bench.ask(LoadLane(LaneEntry("c", "/c")))
    assert bench.children["m2-engine-0"].child.environment[ASIDE] == "1"


def test_a_model_that_ends_before_it_served_is_given_up(bench: Bench) -> None:
    bench.ask(LoadLane(LaneEntry("c", "/c")))
    bench.ask(NameModels("canary", {"a": 9, "c": 1}))
    bench.ends("m2-engine-0", 2.0)
    assert bench.dismissed == ["m2"] and "m2" not in bench.states
    assert bench.table.given_up == {"m2": "m2-engine-0 ended"} and bench.table.aliases["canary"] == {"a": 9}
    assert bench.ask(LoadLane(LaneEntry("c", "/c"))).lane == "m3"  # a number is never used twice


def test_nothing_is_left_of_a_model_in_the_run_directory_once_its_processes_have_ended(bench: Bench) -> None:
    bench.ask(LoadLane(LaneEntry("c", "/c")))
    (bench.directory / "m2-engine-0.blobs").mkdir()
    others = {"m1-engine-0", "m2-gateway-0", "models.json"}
    for name in ("m2-engine-0", "m2-engine-0.alive", "m2-engine-0.blobs/x", "m2-tokenizer-0.alive", *others):
        (bench.directory / name).touch()
    bench.ending = {"m2"}
    bench.ask(UnloadLane("c", 0.0))
    bench.turn(2.0)
    bench.turn(3.0)
    assert (bench.directory / "m2-engine-0").exists()
    bench.ending = set()
    bench.turn(4.0)
    assert {path.name for path in bench.directory.iterdir()} == others  # a gateway removes its own
