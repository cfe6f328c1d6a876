"""The models of a service that come and go: what is started, written, said and ended, and when."""

import errno
from pathlib import Path

import pytest

from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.model_commands import (
    Answer,
    Command,
    LoadLane,
    NameModels,
    SleepLane,
    UnloadLane,
    WakeLane,
)
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, read_table
from sluice_server.services.supervisor import lanes
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.lane import SELDOM_S
from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.room import Budget

TWO = {"m0": LaneEntry("a", "/a"), "m1": LaneEntry("b", "/b")}
GATEWAYS = {"gateway-0", "gateway-1"}
PLENTY = Budget(1 << 40)


def planned(lane: str, entry: LaneEntry) -> list[Child]:
    roles = (Role.ENGINE, Role.TOKENIZER)
    return [Child(f"{lane}-{role}-0", role, {}, lane=lane) for role in roles]


class Bench:
    """Lanes, their table, and the processes that they start and end."""

    def __init__(
        self, directory: Path, table: ModelTable | None = None, max_restarts: int = 1, budget: Budget = PLENTY
    ) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.children: dict[str, Running] = {}
        self.dismissed: list[str] = []
        first = table or ModelTable(dict(TWO), "chat", {"chat": {"a": 1}})
        self.ending: set[str] = set()  # lanes whose processes have not ended yet
        self.lanes = Lanes(planned, directory, self.said.append, max_restarts, first, budget)
        self.lanes.start(0.0, self)

    def join(self, children: list[Child]) -> None:
        for child in children:
            self.children[child.process_id] = Running(child, ("true",), self.directory, -1)

    def dismiss_lane(self, lane: str) -> None:
        self.dismissed.append(lane)

    def is_lane_there(self, lane: str) -> bool:
        return lane in self.ending

    def forget(self, child: Running) -> None:
        del self.children[child.name]

    def end_group(self, child: Running, start_at_s: float) -> None:
        """Nothing: the processes are alone."""

    def serving(
        self,
        *lanes: str,
        drained: str = "",
        busy: str = "",
        gateways: set[str] = GATEWAYS,
        waiting: str | None = None,
        before: int = 0,
    ) -> None:
        """Says so at gateways. `waiting`: all that are busy, unless it is given. `before`: how many changes ago what is
        drained was."""
        entries = self.table.lanes
        last = {f"{name}@{entries[name].leaves - before}" for name in drained.split()}
        waits = busy if waiting is None else waiting
        for gateway in gateways:
            self.lanes.reports.heard(
                gateway, frozenset(lanes), frozenset(last), frozenset(busy.split()), frozenset(waits.split())
            )

    def turn(self, now_s: float) -> dict[str, LaneState]:
        self.lanes.turn(now_s, GATEWAYS, self)
        return self.states

    def ends(self, name: str, now_s: float) -> float | None:
        """Ends a process; returns when it is started again."""
        child = self.children[name]
        self.lanes.ended(child, f"{name} ended", now_s, self, is_planned=False)
        return child.start_at_s

    def ask(self, command: Command, now_s: float = 1.0) -> Answer:
        return self.lanes.carry_out(command, now_s, self)

    @property
    def table(self) -> ModelTable:
        return read_table(self.directory)

    @property
    def states(self) -> dict[str, LaneState]:
        return {name: entry.state for name, entry in self.table.lanes.items()}


def test_models_that_sleep_at_the_start_are_in_the_table_from_then_on(tmp_path: Path) -> None:
    entries = {"m0": LaneEntry("a", "/a"), "m1": LaneEntry("b", "/b", state=LaneState.SLEEPING)}
    assert Bench(tmp_path, ModelTable(entries, "a")).states == {"m0": LaneState.LOADING, "m1": LaneState.SLEEPING}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_model_is_ready_once_every_gateway_says_so(bench: Bench) -> None:
    bench.serving("m0", gateways={"gateway-0"})
    assert set(bench.turn(1.0).values()) == {LaneState.LOADING} and not bench.lanes.is_settled
    bench.serving("m0", "m1")
    assert set(bench.turn(2.0).values()) == {LaneState.READY} and bench.lanes.is_settled
    assert bench.said == [f"sluice: the model {name} serves after 2.00 s" for name in "ab"]


def test_each_change_of_the_table_is_news_once(bench: Bench) -> None:
    assert bench.lanes.take_news() and not bench.lanes.take_news()
    bench.turn(1.0)
    assert not bench.lanes.take_news()
    bench.serving("m0", "m1")
    bench.turn(2.0)
    assert bench.lanes.take_news() and not bench.lanes.take_news()


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


def test_a_model_that_is_asked_for_is_planned_once_and_serves(bench: Bench) -> None:
    entry = LaneEntry("c", "/c")
    assert [bench.ask(LoadLane(entry)).lane for _ in range(2)] == ["m2", "m2"] and "m2-engine-0" in bench.children
    bench.serving("m0", "m1", "m2")
    assert bench.turn(3.0)["m2"] is LaneState.READY
    other = bench.ask(LoadLane(LaneEntry("c", "/d")))
    assert (other.reason, bench.ask(LoadLane(LaneEntry("chat", "/d"))).reason) == ("MODEL_EXISTS", "MODEL_EXISTS")


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


def test_a_table_that_cannot_be_written_on_a_full_disk_is_written_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, table: ModelTable) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(lanes, "write_table", full)
        assert bench.ask(LoadLane(LaneEntry("c", "/c"))).lane == "m2"
        bench.turn(2.0)
    assert "m2" not in bench.states and sum("No space left on device" in line for line in bench.said) == 1
    assert bench.turn(3.0)["m2"] is LaneState.LOADING


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
