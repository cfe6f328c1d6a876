"""Lets engines join and leave while a service runs: one more at SIGTTIN, the newest one fewer at SIGTTOU.

The engines are a file that gateways, tokenizers and engines read again when it changes. An engine that joins gets
requests once it has made a token. One that leaves gets no new requests, finishes those that it has, and then exits;
what it has not finished within the grace time goes on at the others. One change is made at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.engine_table import EngineEntry, write_table
from sluice_server.services.process.lane_ring import ENGINES_FILE, address_of, ring_of
from sluice_server.services.ranks.here import check_cores
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.plan import plan_engine


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStates:
    """What a gateway says of the engines: which of them serve, and which have no request left."""

    serving: frozenset[str]
    drained: frozenset[str]


UNKNOWN = EngineStates(frozenset(), frozenset())


class EngineProcesses(Protocol):
    """What starts and ends the processes of engines."""

    def join(self, children: list[Child]) -> None:
        """Starts the processes of another engine."""

    def dismiss(self, engine: str) -> None:
        """Asks the processes of an engine to exit; they are not started again."""

    def is_there(self, engine: str) -> bool:
        """Whether a process of the engine is left."""


class EngineFile:
    """The engines of a service, in the file that its processes read, and the plan of another one."""

    def __init__(self, engine: EngineConfig, service: ServiceConfig, directory: Path, num_processes: int) -> None:
        """`num_processes`: those that were planned at the start. Raises OSError if the file cannot be written."""
        self._engine = engine
        self._service = service
        self._directory = directory
        self._num_processes = num_processes
        self.entries: dict[str, EngineEntry] = {}
        for at in range(service.engines):
            self.put(f"{Role.ENGINE}-{at}")
        self.write()

    def plan(self) -> tuple[str, list[Child]]:
        """Returns the name of another engine, and its processes. Raises ServiceError if the machine or the settings
        allow none."""
        # Imported here: most services never do this, and would have the code of it all the time.
        from sluice_server.services.checks.settings import check

        service = dataclasses.replace(self._service, engines=len(self.entries) + 1)
        check(self._engine, service)
        check_cores(self._engine, service)
        number = next(at for at in range(len(self.entries) + 1) if f"{Role.ENGINE}-{at}" not in self.entries)
        name = f"{Role.ENGINE}-{number}"
        # An engine that was there at the start has its own port again; the ports of the others follow all of the start.
        at = (
            number * self._engine.num_ranks
            if number < self._service.engines
            else self._num_processes + number - self._service.engines
        )
        return name, plan_engine(self._engine, ring_of(service, self._directory), self._directory, name, at)

    def put(self, name: str, *, draining: bool = False) -> None:
        """Adds an engine, or says that it drains."""
        self.entries[name] = EngineEntry(address_of(self._directory, name), draining)

    def write(self) -> None:
        """Writes the file. Raises OSError."""
        write_table(self._directory / ENGINES_FILE, self.entries)


@dataclasses.dataclass(slots=True)
class _Change:
    """An engine that joins, or one that leaves; and since when."""

    engine: str
    joins: bool
    since_s: float
    has_left: bool = False  # it is no longer in the file


class EngineScale:
    """Makes the number of engines what the signals asked for."""

    def __init__(self, file: EngineFile, say: Callable[[str], None], grace_s: float) -> None:
        """`grace_s`: how long the requests of an engine that leaves may stay with it."""
        self._file = file
        self._say = say
        self._grace_s = grace_s
        self._wanted = len(file.entries)
        self._change: _Change | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an engine joins or leaves at present."""
        return self._change is not None

    def ask(self, more: int) -> None:
        """Asks for one engine more (1) or fewer (-1)."""
        if self._wanted + more < 1:
            self._say("sluice: the last engine stays; stop the service to end it")
        else:
            self._wanted += more

    def rewrite(self) -> None:
        """Writes the file again, whose directory was gone."""
        self._write()

    def ended(self, name: str, how: str) -> bool:
        """Takes the end of a process; returns True if the process is not to be started again, because its engine joins
        and has not served yet, or leaves."""
        change = self._change
        if change is None or name != change.engine:
            return False
        if change.joins:
            self._say(f"sluice: {how}, before it served; it does not join")
        elif not change.has_left:
            self._say(f"sluice: {how}, while it drained")
        self._take_out(change)
        return True

    def turn(
        self, now_s: float, processes: EngineProcesses, states: Mapping[str, EngineStates], return_s: float
    ) -> None:
        """Goes on with a change, or begins one. `states`: of each gateway. An engine that does not serve within
        `return_s` does not join."""
        change = self._change
        if change is None:
            self._begin(now_s, processes)
        elif change.has_left:
            if not processes.is_there(change.engine):
                self._end()
        elif change.joins:
            self._joining(change, now_s, processes, states, return_s)
        elif all(change.engine in one.drained for one in states.values()) or now_s - change.since_s > self._grace_s:
            self._take_out(change)
            processes.dismiss(change.engine)

    def _begin(self, now_s: float, processes: EngineProcesses) -> None:
        num = len(self._file.entries)
        if self._wanted > num:
            try:
                name, children = self._file.plan()
            except ServiceError as error:
                self._say(f"sluice: no engine joins: {error.message}")
                self._wanted = num
                return
            self._file.put(name)
            self._write()
            processes.join(children)
            self._say(f"sluice: {name} joins")
            self._change = _Change(name, joins=True, since_s=now_s)
        elif self._wanted < num:
            name = max(self._file.entries, key=lambda one: int(one.rpartition("-")[2]))
            self._file.put(name, draining=True)
            self._write()
            self._say(f"sluice: {name} leaves once its requests have ended, or in {self._grace_s:g} s")
            self._change = _Change(name, joins=False, since_s=now_s)

    def _joining(
        self,
        change: _Change,
        now_s: float,
        processes: EngineProcesses,
        states: Mapping[str, EngineStates],
        return_s: float,
    ) -> None:
        if all(change.engine in one.serving for one in states.values()):
            self._say(f"sluice: {change.engine} serves after {now_s - change.since_s:.1f} s")
            self._end()
        elif now_s - change.since_s > return_s:
            self._say(f"sluice: {change.engine} did not serve within {return_s:.1f} s; it does not join")
            self._take_out(change)
            processes.dismiss(change.engine)

    def _take_out(self, change: _Change) -> None:
        """Takes an engine out of the file: what it has not finished goes on at the others."""
        change.has_left = True
        if change.joins:
            self._wanted = min(self._wanted, len(self._file.entries) - 1)
        if self._file.entries.pop(change.engine, None) is not None:
            self._write()

    def _end(self) -> None:
        change, self._change = self._change, None
        assert change is not None
        if change.has_left and not change.joins:
            self._say(f"sluice: {change.engine} has left; still there: {', '.join(sorted(self._file.entries))}")

    def _write(self) -> None:
        try:
            self._file.write()
        except OSError as error:  # as after the loss of the run directory
            self._say(f"sluice: the file of the engines cannot be written ({error.strerror})")
