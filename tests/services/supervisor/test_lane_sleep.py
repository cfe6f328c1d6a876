"""How lanes fall asleep at both levels and wake: what is told, what is counted, and what calls one back."""

from pathlib import Path

import msgspec
import pytest

from sluice_server.services.process.model_commands import LoadLane, SleepLane, UnloadLane, WakeLane
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, PlannedBytes
from tests.services.supervisor.lane_bench import Bench
from tests.services.supervisor.test_lane_room import GIB, ROOM


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return served(tmp_path, entry("a", 1), entry("b", 2, 4))


def entry(model: str, weights: int, cache: int = 0, state: LaneState = LaneState.LOADING) -> LaneEntry:
    planned = PlannedBytes(weights=weights * GIB, cache=cache * GIB)
    return LaneEntry(model, f"/{model}", planned=planned, state=state)


def served(directory: Path, *entries: LaneEntry) -> Bench:
    """Lanes that serve and have nothing open."""
    made = Bench(directory, ModelTable({f"m{at}": one for at, one in enumerate(entries)}), budget=ROOM)
    made.serving(*made.table.lanes)
    made.turn(1.0)
    return made


def nap(bench: Bench, lane: str = "m1", *others: str) -> None:
    """Has a lane sleep at level 1, and its engine empty its cache."""
    model = bench.table.lanes[lane].model
    bench.ask(SleepLane(model, 1e9, 1), 2.0)
    assert bench.states[lane] is LaneState.DOZING
    bench.serving("m0", *others, drained=lane)
    assert bench.turn(3.0)[lane] is LaneState.NAPPING and not bench.table.lanes[lane].is_empty
    bench.lanes.reports.heard_of_cache(f"{lane}-engine-0", True)
    bench.turn(3.5)
    assert bench.table.lanes[lane].is_empty and bench.table.lanes[lane].sleep_level == 1


def test_a_lane_naps_with_its_processes_and_a_request_wakes_it(bench: Bench) -> None:
    nap(bench)
    starts, num = bench.table.lanes["m1"].starts, len(bench.children)
    assert not bench.dismissed and bench.said[-1] == "sluice: the model b sleeps, and keeps its weights"
    bench.serving("m0", busy="m1")
    assert bench.turn(4.0)["m1"] is LaneState.LOADING and not bench.table.lanes["m1"].is_empty
    bench.serving("m0", "m1")
    assert bench.turn(5.0)["m1"] is LaneState.READY and bench.said[-1] == "sluice: the model b serves after 1.00 s"
    assert bench.table.lanes["m1"].starts == starts and len(bench.children) == num


def test_what_was_open_when_a_nap_began_does_not_wake_it(bench: Bench) -> None:
    bench.serving("m0", "m1", busy="m1", waiting="")
    bench.ask(SleepLane("b", 1.0, 1), 2.0)
    bench.turn(3.5)
    assert bench.turn(4.0)["m1"] is LaneState.NAPPING  # its time was over: gateways end it


def test_the_cache_of_a_nap_is_room_for_others_once_it_is_given_back(tmp_path: Path) -> None:
    bench = served(tmp_path, entry("a", 1), entry("b", 2, 6))
    bench.ask(SleepLane("b", 1e9, 1), 2.0)
    bench.serving("m0", drained="m1")
    bench.turn(3.0)
    assert not bench.ask(LoadLane(entry("c", 7)), 3.0).code and "m2-engine-0" not in bench.children
    bench.lanes.reports.heard_of_cache("m1-engine-0", True)
    bench.turn(4.0)
    assert "m2-engine-0" in bench.children and bench.states["m1"] is LaneState.NAPPING
    bench.lanes.reports.heard_of_cache("m1-engine-0", False)
    bench.turn(5.0)
    assert not bench.table.lanes["m1"].is_empty


def test_a_nap_ends_its_processes_where_others_need_the_room(tmp_path: Path) -> None:
    bench = served(tmp_path, entry("a", 1), entry("b", 2, 6))
    nap(bench)
    assert not bench.ask(LoadLane(entry("c", 9)), 4.0).code
    assert bench.turn(5.0)["m1"] is LaneState.SLEEPING and bench.dismissed == ["m1"]
    bench.turn(6.0)
    assert "m2-engine-0" in bench.children


def test_two_naps_that_are_both_wanted_do_not_wait_for_each_other(tmp_path: Path) -> None:
    bench = served(tmp_path, entry("a", 1), entry("b", 2, 3), entry("c", 1, 3))
    nap(bench, "m1", "m2")
    nap(bench, "m2")
    pinned = msgspec.structs.replace(entry("d", 4), pinned=True)  # takes the room of their caches
    assert not bench.ask(LoadLane(pinned), 4.0).code
    bench.serving("m0", "m3", busy="m1 m2")
    bench.turn(5.0)
    assert bench.turn(6.0)["m2"] is LaneState.SLEEPING
    assert bench.turn(7.0)["m1"] is LaneState.LOADING


def test_an_engine_that_ends_while_its_lane_naps_empties_its_cache_again(bench: Bench) -> None:
    nap(bench)
    assert bench.ends("m1-engine-0", 5.0) == 5.0
    assert bench.turn(6.0)["m1"] is LaneState.NAPPING and not bench.table.lanes["m1"].is_empty
    bench.lanes.reports.heard_of_cache("m1-engine-0", True)
    bench.turn(7.0)
    assert bench.table.lanes["m1"].is_empty
    bench.ends("m1-engine-0", 8.0)
    assert bench.states["m1"] is LaneState.FAILED


def test_a_nap_may_become_deeper_or_end_for_good(tmp_path: Path, bench: Bench) -> None:
    nap(bench)
    bench.ask(SleepLane("b", 1e9, 1), 4.0)
    assert bench.turn(4.0)["m1"] is LaneState.NAPPING
    bench.ask(SleepLane("b", 1e9), 4.0)
    assert bench.turn(5.0)["m1"] is LaneState.SLEEPING
    bench.ask(SleepLane("b", 1e9, 1), 6.0)
    assert bench.turn(6.0)["m1"] is LaneState.SLEEPING
    other = served(tmp_path, entry("a", 1), entry("b", 2, 4))
    nap(other)
    assert not other.ask(UnloadLane("b", 1e9), 4.0).code and other.dismissed == ["m1"] and "m1" not in other.states


def test_an_operator_wakes_a_nap(bench: Bench) -> None:
    nap(bench)
    assert bench.ask(WakeLane("b"), 4.0).lane == "m1" and bench.turn(4.5)["m1"] is LaneState.LOADING


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_calls_a_lane_back_that_is_about_to_sleep_for_an_operator(bench: Bench, level: int) -> None:
    bench.ask(SleepLane("b", 1e9, level), 2.0)
    bench.serving("m0", busy="m1", waiting="")
    assert bench.turn(3.0)["m1"] is LaneState.DOZING  # what runs does not
    bench.serving("m0", busy="m1", drained="m1")
    assert bench.turn(3.0)["m1"] is LaneState.LOADING
    assert bench.said[-1] == "sluice: the model b does not sleep: requests wait for it"
    bench.serving("m0", "m1")
    assert bench.turn(4.0)["m1"] is LaneState.READY and not bench.dismissed


def test_a_request_does_not_call_back_a_lane_that_makes_room(tmp_path: Path) -> None:
    bench = served(tmp_path, entry("a", 1), entry("b", 6))
    bench.ask(LoadLane(entry("c", 7)), 2.0)
    bench.ask(SleepLane("b", 1e9, 1), 2.5)
    bench.serving("m0", busy="m1")
    assert bench.turn(3.0)["m1"] is LaneState.DOZING
    bench.serving("m0", busy="m1", drained="m1")
    assert bench.turn(4.0)["m1"] is LaneState.SLEEPING


def test_what_gateways_said_of_an_earlier_sleep_does_not_end_a_later_one(bench: Bench) -> None:
    bench.ask(SleepLane("b", 1e9), 2.0)
    bench.ask(WakeLane("b"), 2.0)
    bench.ask(SleepLane("b", 1e9), 2.0)
    bench.serving("m0", drained="m1", before=1)
    assert bench.turn(3.0)["m1"] is LaneState.DOZING
    bench.serving("m0", drained="m1")
    assert bench.turn(4.0)["m1"] is LaneState.SLEEPING


def test_a_lane_that_waits_for_room_and_is_called_back_waits_on(tmp_path: Path) -> None:
    bench = served(tmp_path, entry("a", 1), entry("b", 6))
    bench.ask(LoadLane(entry("c", 7)), 2.0)
    bench.ask(SleepLane("c", 1e9, 1), 3.0)
    bench.ask(WakeLane("c"), 3.0)
    bench.serving("m0", drained="m1")
    bench.turn(4.0)
    assert bench.turn(5.0)["m2"] is LaneState.LOADING and "m2-engine-0" in bench.children


def test_how_long_a_start_takes_is_not_how_long_ago_it_was(bench: Bench) -> None:
    lane = bench.lanes.table.lanes["m1"]
    assert lane.load_s == 1.0
    bench.ask(SleepLane("b", 1e9), 100.0)
    bench.ask(WakeLane("b"), 100.0)
    bench.serving("m0", "m1")
    bench.turn(103.0)
    assert bench.said[-1] == "sluice: the model b serves after 3.00 s" and lane.load_s == 1.0
    bench.ends("m1-engine-0", 200.0)
    bench.serving("m0", "m1")
    bench.turn(204.0)
    assert bench.said[-1] == "sluice: the model b serves after 4.00 s" and lane.load_s == 4.0
    nap(bench)
    bench.ask(WakeLane("b"), 300.0)
    bench.turn(300.0)
    bench.serving("m0", "m1")
    bench.turn(302.0)
    assert bench.said[-1] == "sluice: the model b serves after 2.00 s" and lane.load_s == 4.0
