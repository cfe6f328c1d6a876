"""What gateways, edges and engines tell their supervisor, line by line over a pipe."""

from collections.abc import Callable
from typing import TypeAlias

from sluice_server.services.process.supervised import CACHE, ENGINES, LANES, TEMPLATES
from sluice_server.services.supervisor.scale import UNKNOWN, EngineStates

Names: TypeAlias = frozenset[str]
OnLanes: TypeAlias = Callable[[str, Names, Names, Names, Names], None]
OnCache: TypeAlias = Callable[[str, bool], None]


class Heard:
    """The processes that serve, as far as they have said so.

    Attributes:
        serving: gateways that admit requests while every engine serves, and edges that listen.
        address: of the gateway that said last that it serves, and its model's revision.
        on_lanes: gets what a gateway says of lanes; see `LaneReports.heard`.
        on_cache: gets what an engine says: its name, and whether its cache is empty.
        on_template: gets the kind of a template that can fork.
    """

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self.address = ""
        self.on_lanes: OnLanes = lambda gateway, serving, drained, busy, waiting: None
        self.on_cache: OnCache = lambda engine, is_empty: None
        self.on_template: Callable[[str], None] = lambda kind: None
        self._states: dict[str, EngineStates] = {}  # of engines, by gateway
        self._rest = ""  # the beginning of a line

    def lines(self, data: bytes) -> list[str]:
        """Returns the whole lines of what was read."""
        *whole, self._rest = (self._rest + data.decode()).split("\n")
        return whole

    def take(self, line: str, *, is_gateway: bool) -> bool:
        """Takes a line; returns whether it says that its process serves. `is_gateway`: whether a gateway said so."""
        what, name, rest = line.split(maxsplit=2)
        if what == CACHE:
            self.on_cache(name, rest == "1")
            return False
        if what == TEMPLATES:
            self.on_template(name)
            return False
        if what in (ENGINES, LANES):
            told = [frozenset(filter(None, part.split(","))) for part in rest.split(";")]
            if what == LANES:
                serving, drained, busy, waiting = told
                self.on_lanes(name, serving, drained, busy, waiting)
            else:
                self._states[name] = EngineStates(*told)
            return False
        self.serving.add(name)
        if is_gateway:
            self.address = rest
        return True

    def states(self, gateways: list[str]) -> dict[str, EngineStates]:
        """Returns what each of these gateways said of the engines."""
        return {name: self._states.get(name, UNKNOWN) for name in gateways}

    def ended(self, name: str) -> None:
        """Forgets what a process said that has ended."""
        self.serving.discard(name)
        self._states.pop(name, None)


def name_in(line: str) -> str:
    """Returns the process that a line is from."""
    return line.split(maxsplit=2)[1]
