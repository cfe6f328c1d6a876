"""Lanes of a supervisor for tests: their table, what gateways say, and the processes that they start and end."""

from pathlib import Path

from sluice_server.services.messages.processes import Role
from sluice_server.services.process.model_commands import (
    Answer,
    Command,
)
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, read_table
from sluice_server.services.supervisor.children import Child, Running
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
