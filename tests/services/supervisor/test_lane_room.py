"""What starts when memory is short: what is refused, what makes room, and in which order lanes take turns."""

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest

from sluice_server.services.process.model_commands import LoadLane, NameModels, SleepLane, WakeLane
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, PlannedBytes
from sluice_server.services.supervisor.room import Budget
from tests.services.supervisor.lane_bench import Bench

GIB = 1 << 30
ROOM = Budget(11 * GIB, fronts=GIB)


def entry(model: str, size: int, *, pinned: bool = False, state: LaneState = LaneState.LOADING) -> LaneEntry:
    """A model that takes so many GiB."""
    return LaneEntry(model, f"/{model}", planned=PlannedBytes(weights=size * GIB), pinned=pinned, state=state)


def bench_of(directory: Path, *entries: LaneEntry) -> Bench:
    """Lanes of which all that were to start serve, used in their order."""
    made = Bench(directory, ModelTable({f"m{at}": one for at, one in enumerate(entries)}), budget=ROOM)
    up = [name for name, one in made.table.lanes.items() if one.state is LaneState.LOADING]
    made.serving(*up)
    made.turn(1.0)
    for at, name in enumerate(up):
        made.serving(*up, busy=name)
        made.turn(2.0 + at)
    made.serving(*up)
    made.turn(9.0)
    made.children.clear()
    return made


def dozing(bench: Bench) -> set[str]:
    return {name for name, state in bench.states.items() if state is LaneState.DOZING}


def test_a_load_that_cannot_fit_says_what_it_needs_and_nothing_is_started(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 3, pinned=True))
    before = bench.table
    answer = bench.ask(LoadLane(entry("c", 4)))
    assert answer.reason == "MEMORY_BUDGET" and "needs 4096 MiB (4096 MiB of weights), and 3072 MiB" in answer.message
    assert bench.table == before and not bench.children
    assert bench.ask(LoadLane(entry("c", 3))).lane == "m2" and "m2-engine-0" in bench.children


def test_idle_models_make_room_the_one_first_that_was_used_longest_ago(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, entry("a", 1), entry("b", 3), entry("c", 3), entry("d", 3))
    assert bench.ask(LoadLane(entry("e", 3)), 10.0).lane == "m4"
    assert dozing(bench) == {"m1"} and not bench.children and bench.states["m4"] is LaneState.LOADING
    assert bench.said[-2:] == [
        "sluice: the model b makes room for e",
        "sluice: the model e is being loaded (m4)",
    ]
    bench.ending = {"m1"}
    bench.serving("m0", "m2", "m3", drained="m1")
    assert bench.turn(11.0)["m1"] is LaneState.SLEEPING and not bench.children  # its processes have not ended yet
    bench.ending = set()
    bench.turn(12.0)
    assert "m4-engine-0" in bench.children


@pytest.mark.parametrize("spared", ["busy", "pinned", "loading"])
def test_what_is_used_pinned_the_default_or_being_loaded_never_makes_room(tmp_path: Path, spared: str) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 4, pinned=spared == "pinned"))
    if spared == "busy":
        bench.serving("m0", "m1", busy="m1", gateways={"gateway-1"})
    elif spared == "loading":
        bench.ends("m1-engine-0", 10.0) if bench.children else bench.lanes.table.lanes["m1"].become(LaneState.LOADING)
    assert bench.ask(LoadLane(entry("c", 3)), 10.0).reason == "MEMORY_BUDGET" and not dozing(bench)


def test_the_models_of_an_alias_that_is_the_default_stay(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 4))
    bench.lanes.table.names.default = "chat"
    bench.ask(NameModels("chat", {"b": 1}))
    assert bench.ask(LoadLane(entry("c", 4)), 10.0).lane == "m2" and dozing(bench) == {"m0"}


def test_what_the_model_of_the_service_takes_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ModelTable({"m0": LaneEntry("a", "/a", state=LaneState.READY)}), budget=ROOM)
    command = LoadLane(entry("b", 4), beside=PlannedBytes(weights=7 * GIB))
    assert bench.ask(command).reason == "MEMORY_BUDGET"
    assert not bench.ask(LoadLane(command.entry, beside=PlannedBytes(weights=6 * GIB))).code


def test_a_request_for_a_model_that_sleeps_wakes_it_and_one_that_is_withdrawn_does_not(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 6), entry("c", 6, state=LaneState.SLEEPING))
    bench.serving("m0", "m1", busy="m2", gateways={"gateway-0"})
    assert dozing(bench) == set() and bench.turn(10.0)["m1"] is LaneState.DOZING
    bench.serving("m0", drained="m1")  # nobody waits any more
    bench.turn(11.0)
    assert bench.turn(12.0)["m2"] is LaneState.SLEEPING and not bench.children
    bench.serving("m0", busy="m2")
    assert bench.turn(13.0)["m2"] is LaneState.LOADING and "m2-engine-0" in bench.children


def test_a_model_for_which_there_is_no_room_beside_pinned_ones_says_so_until_there_is(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 4, pinned=True), entry("c", 4, state=LaneState.SLEEPING))
    bench.serving("m0", "m1", busy="m2")
    bench.turn(10.0)
    assert "needs 4096 MiB" in bench.table.lanes["m2"].why and bench.states["m2"] is LaneState.SLEEPING
    bench.ask(SleepLane("b", 0.0), 11.0)
    bench.serving("m0")
    bench.turn(12.0)
    bench.turn(13.0)
    assert bench.table.lanes["m2"].why == "" and bench.ask(WakeLane("c"), 14.0).lane == "m2"
    assert bench.turn(14.0)["m2"] is LaneState.LOADING


def test_a_small_model_does_not_take_the_room_that_a_larger_one_waits_for(tmp_path: Path) -> None:
    sleeping = [entry(name, size, state=LaneState.SLEEPING) for name, size in (("c", 5), ("d", 1))]
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 4), *sleeping)
    bench.serving("m0", "m1", busy="m1 m2", gateways={"gateway-0"})
    bench.turn(10.0)
    assert dozing(bench) == {"m1"}  # it has served for long enough; what it has open ends first
    bench.serving("m0", "m1", busy="m1 m2 m3", gateways={"gateway-0"})
    assert bench.turn(11.0)["m3"] is LaneState.SLEEPING
    bench.serving("m0", busy="m2 m3", drained="m1")
    bench.turn(12.0)
    bench.turn(13.0)
    assert [name for name in bench.children if name.endswith("engine-0")] == ["m2-engine-0", "m3-engine-0"]


@pytest.mark.parametrize(("busy", "due_s"), [("m1 m2", 51.0), ("m2", 13.0)])
def test_it_is_known_when_a_turn_ends_for_which_somebody_waits(tmp_path: Path, busy: str, due_s: float) -> None:
    bench = bench_of(tmp_path, entry("a", 4), entry("b", 6), entry("c", 6, state=LaneState.SLEEPING))
    bench.lanes.table.lanes["m1"].load_s = 100.0  # it has served since 1 s, and was used at 3 s
    assert bench.turn(9.0)["m1"] is LaneState.READY and bench.lanes.due_s(9.0) == math.inf
    bench.serving("m0", "m1", busy=busy)
    assert bench.turn(10.0)["m1"] is LaneState.READY and bench.lanes.due_s(10.0) == due_s
    assert bench.turn(due_s - 0.01)["m1"] is LaneState.READY
    assert bench.turn(due_s)["m1"] is LaneState.DOZING and bench.lanes.due_s(due_s) == math.inf


LOAD_S, EXIT_S, WORK_S, TICK_S = 2.0, 0.25, 0.3, 0.05


@dataclasses.dataclass
class Client:
    """A client that asks for one model after the other, as soon as it has its answer."""

    order: "itertools.cycle[str]"
    lane: str = ""
    since_s: float = 0.0
    left_s: float = 0.0
    waits: list[float] = dataclasses.field(default_factory=list)

    def ask(self, now_s: float) -> None:
        self.lane, self.since_s, self.left_s = next(self.order), now_s, WORK_S


class Turns:
    """Two models with room for one beside the default, and clients; time is played."""

    def __init__(self, directory: Path, orders: list[str]) -> None:
        asleep = entry("c", 6, state=LaneState.SLEEPING)
        self.bench = Bench(directory, ModelTable({"m0": entry("a", 4), "m1": entry("b", 6), "m2": asleep}), budget=ROOM)
        self.clients = [Client(itertools.cycle(order)) for order in orders]
        self.loads: Counter[str] = Counter()
        self._up = {"m0": 0.0, "m1": 0.0}  # when each serves
        self._gone: dict[str, float] = {}

    def run(self, seconds: float) -> None:
        for client in self.clients:
            client.ask(0.0)
        for at in range(int(seconds / TICK_S)):
            self._tick(at * TICK_S)

    def _tick(self, now_s: float) -> None:
        bench, lanes = self.bench, {name for name, at in self._up.items() if at <= now_s}
        states = bench.states
        sending = {name for name in lanes if states[name] is LaneState.READY}
        for client in self.clients:
            if client.lane in sending or (client.left_s < WORK_S and client.lane in lanes):
                client.left_s -= TICK_S
            if client.left_s <= 0:
                client.waits.append(now_s - client.since_s)
                client.ask(now_s)
        running = {one.lane for one in self.clients if one.left_s < WORK_S}
        drained = {name for name, state in states.items() if state is LaneState.DOZING} - running
        bench.serving(*lanes, drained=" ".join(drained), busy=" ".join(one.lane for one in self.clients))
        bench.ending = {name for name, at in self._gone.items() if at > now_s}
        bench.turn(now_s)
        for name in {name.split("-")[0] for name in bench.children} - self._up.keys():
            self._up[name] = now_s + LOAD_S
            self.loads[name] += 1
        for name in bench.dismissed:
            del self._up[name]
            self._gone[name] = now_s + EXIT_S
            for child in [child for child in bench.children if child.startswith(name)]:
                del bench.children[child]
        bench.dismissed.clear()


@pytest.mark.parametrize(
    "orders",
    [
        ["12", "12", "12", "12"],  # all alternate
        ["12", "12", "21", "21"],
        ["1", "1", "2", "2"],  # each stays with its model, which is never idle by itself
        ["1", "1", "1", "2"],
        ["112", "221", "1", "2"],
    ],
)
def test_models_that_share_the_room_of_one_take_turns_without_thrashing(tmp_path: Path, orders: list[str]) -> None:
    turns = Turns(tmp_path, [" ".join(f"m{one}" for one in order) for order in orders])
    turns.clients = [Client(itertools.cycle([f"m{one}" for one in order])) for order in orders]
    turns.run(120.0)
    waits = [wait for client in turns.clients for wait in client.waits]
    assert turns.loads.total() <= len(waits) / 2 and all(client.waits for client in turns.clients)
    # The processes of the other model end and what they had open does, beside two starts and one stay.
    assert max(waits) <= 3 * LOAD_S + 2 * (EXIT_S + WORK_S + 4 * TICK_S)
