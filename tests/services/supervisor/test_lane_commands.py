"""What operators ask of the models of a service, and what is refused."""

from pathlib import Path

import pytest

from sluice_server.services.process.model_commands import (
    LoadLane,
    NameModels,
    SleepLane,
    UnloadLane,
    WakeLane,
)
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from tests.services.supervisor.lane_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_model_that_is_asked_for_is_planned_once_and_serves(bench: Bench) -> None:
    entry = LaneEntry("c", "/c")
    assert [bench.ask(LoadLane(entry)).lane for _ in range(2)] == ["m2", "m2"] and "m2-engine-0" in bench.children
    bench.serving("m0", "m1", "m2")
    assert bench.turn(3.0)["m2"] is LaneState.READY
    other = bench.ask(LoadLane(LaneEntry("c", "/d")))
    assert (other.reason, bench.ask(LoadLane(LaneEntry("chat", "/d"))).reason) == ("MODEL_EXISTS", "MODEL_EXISTS")


def test_a_model_leaves_when_every_gateway_has_nothing_open_there(bench: Bench) -> None:
    bench.serving("m0", "m1")
    bench.turn(1.0)
    assert bench.ask(UnloadLane("b", 1e9)).lane == "m1" and bench.states["m1"] is LaneState.DRAINING
    bench.serving("m0", drained="m1", gateways={"gateway-0"})
    assert "m1" in bench.turn(2.0) and not bench.dismissed
    assert bench.ask(LoadLane(LaneEntry("b", "/b"))).reason == "MODEL_IN_USE"
    bench.serving("m0", drained="m1")
    assert "m1" not in bench.turn(3.0) and bench.dismissed == ["m1"]


def test_the_grace_ends_and_a_second_unload_may_shorten_it(bench: Bench) -> None:
    bench.ask(UnloadLane("b", 100.0), 1.0)
    bench.ask(UnloadLane("b", 5.0), 2.0)
    assert "m1" in bench.turn(6.9) and "m1" not in bench.turn(7.1)


def test_a_process_that_ends_while_its_lane_drains_does_not_keep_it(bench: Bench) -> None:
    bench.serving("m0", "m1")
    bench.turn(1.0)
    bench.ask(UnloadLane("b", 100.0), 1.0)
    bench.ends("m1-engine-0", 2.0)
    assert bench.states["m1"] is LaneState.DRAINING


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (UnloadLane("a", 0.0), "MODEL_IN_USE"),
        (UnloadLane("none", 0.0), "MODEL_NOT_FOUND"),
        (NameModels("a", {"b": 1}), "MODEL_EXISTS"),
        (NameModels("x", {"none": 1}), "MODEL_NOT_FOUND"),
        (NameModels("x", {"chat": 1}), "MODEL_NOT_FOUND"),  # no alias of an alias
        (NameModels("x", {}), "MODEL_NOT_FOUND"),
        (NameModels("chat", {}), "MODEL_IN_USE"),
    ],
)
def test_what_would_leave_a_name_without_a_model_is_refused(
    bench: Bench, command: UnloadLane | NameModels, reason: str
) -> None:
    before = bench.table
    assert bench.ask(command).reason == reason and bench.table == before


def test_an_alias_moves_and_the_model_before_may_leave(bench: Bench) -> None:
    assert not bench.ask(NameModels("chat", {"a": 1, "b": 3})).code
    assert bench.table.aliases == {"chat": {"a": 1, "b": 3}}
    assert not bench.ask(NameModels("chat", {"b": 1})).code and not bench.ask(UnloadLane("a", 0.0)).code


def test_the_model_of_a_service_of_one_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ModelTable({"m0": LaneEntry("a", "/a", state=LaneState.READY)}))
    assert not bench.children and bench.ask(UnloadLane("a", 0.0)).reason == "MODEL_IN_USE"
    assert bench.ask(LoadLane(LaneEntry("b", "/b"))).lane == "m1"
    assert bench.states == {"m0": LaneState.READY, "m1": LaneState.LOADING}


def asleep(bench: Bench) -> None:
    """Has the model `b` sleep."""
    bench.serving("m0", "m1")
    bench.turn(1.0)
    assert bench.ask(SleepLane("b", 100.0)).lane == "m1" and bench.states["m1"] is LaneState.DOZING
    bench.serving("m0", "m1", drained="m1")
    assert bench.turn(2.0)["m1"] is LaneState.SLEEPING and bench.dismissed == ["m1"]


def test_a_model_sleeps_and_wakes_once_its_processes_have_ended(bench: Bench) -> None:
    asleep(bench)
    bench.children.clear()
    bench.ending = {"m1"}
    bench.serving("m0", "m1")  # the last word of a gateway that has not looked yet
    assert bench.ask(WakeLane("b")).lane == "m1" and bench.turn(3.0)["m1"] is LaneState.SLEEPING
    bench.ending = set()
    assert bench.turn(4.0)["m1"] is LaneState.LOADING and "m1-engine-0" in bench.children
    bench.serving("m0", "m1")
    assert bench.turn(5.0)["m1"] is LaneState.READY and bench.said[-1] == "sluice: the model b serves after 1.00 s"


def test_a_model_that_is_wanted_before_it_sleeps_stays(bench: Bench) -> None:
    bench.serving("m0", "m1")
    bench.turn(1.0)
    bench.ask(SleepLane("b", 100.0))
    bench.ask(LoadLane(LaneEntry("b", "/b")))
    assert bench.turn(200.0)["m1"] is LaneState.READY and not bench.dismissed


def test_a_model_that_sleeps_may_be_named_and_unloaded_at_once(bench: Bench) -> None:
    asleep(bench)
    assert not bench.ask(NameModels("x", {"b": 1})).code and not bench.ask(NameModels("x", {})).code
    assert bench.ask(SleepLane("b", 0.0)).lane == "m1" and bench.states["m1"] is LaneState.SLEEPING
    assert not bench.ask(UnloadLane("b", 100.0)).code and "m1" not in bench.states


def test_what_cannot_sleep_or_wake_says_so(bench: Bench, tmp_path: Path) -> None:
    assert [bench.ask(one).reason for one in (SleepLane("none", 0.0), WakeLane("none"))] == ["MODEL_NOT_FOUND"] * 2
    assert bench.ask(WakeLane("a")).lane == "m0" and bench.states["m0"] is LaneState.LOADING
    assert bench.table.lanes["m0"].starts == 1
    bench.ask(UnloadLane("b", 100.0))
    assert bench.ask(SleepLane("b", 0.0)).reason == "MODEL_IN_USE"
