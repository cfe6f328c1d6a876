"""What gateways and edges tell their supervisor, line by line over a pipe."""

from sluice_server.services.process.supervised import ENGINES
from sluice_server.services.supervisor.scale import UNKNOWN, EngineStates


class Heard:
    """Who serves, as far as it was told.

    Attributes:
        serving: gateways that admit requests while every engine serves, and edges that listen.
        address: of the gateway that said last that it serves, and its model's revision.
    """

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self.address = ""
        self._states: dict[str, EngineStates] = {}  # of engines, by gateway

    def take(self, line: str, *, is_gateway: bool) -> bool:
        """Takes a line; returns whether it says that its process serves. `is_gateway`: whether a gateway said so."""
        what, name, rest = line.split(maxsplit=2)
        if what == ENGINES:
            serving, _, drained = rest.partition(";")
            self._states[name] = EngineStates(frozenset(serving.split(",")), frozenset(drained.split(",")))
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
