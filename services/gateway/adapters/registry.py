"""The adapters of a service by name, as this gateway knows them. Pure.

Learned from the engines' answers to loads, and from their reports, by which gateways learn of each other's loads. An
engine that was started anew has none: what it lacks is loaded there again, and not forgotten.
"""

from collections.abc import Iterable, Mapping

from sluice_server.engine.request import AdapterRef
from sluice_server.services.messages.details import AdapterState


class AdapterRegistry:
    """Adapters by name, and what each engine has."""

    def __init__(self) -> None:
        self._adapters: dict[str, AdapterState] = {}
        self._engines: dict[str, tuple[int, Mapping[str, AdapterState]]] = {}  # epoch, and adapters by name
        self._changes: dict[str, int] = {}  # by engine: changes to its names that are known here

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, name: str) -> AdapterState | None:
        """Returns the adapter of that name."""
        return self._adapters.get(name)

    def names(self) -> list[str]:
        """Returns all names, sorted."""
        return sorted(self._adapters)

    def add(self, state: AdapterState) -> None:
        """Adds an adapter, in the place of one that had its name."""
        self._adapters[state.name] = state

    def remove(self, name: str) -> AdapterState | None:
        """Forgets a name; returns its adapter, if it had one."""
        return self._adapters.pop(name, None)

    def answered(self, engine: str, num_changes: int) -> None:
        """Notes how many changes an engine had made when it answered: older reports are ignored."""
        self._changes[engine] = max(num_changes, self._changes.get(engine, 0))

    def reported(
        self, engine: str, epoch: int, states: Iterable[AdapterState], num_changes: int = 0
    ) -> list[AdapterState]:
        """Takes what an engine has. Returns the adapters that an engine lacks which has joined or was started anew."""
        has_joined = engine not in self._engines
        known, before = self._engines.get(engine, (epoch, {}))
        now = {one.name: one for one in states}
        if epoch < known or (epoch == known and num_changes < self._changes.get(engine, 0)):
            return []  # of a process that has ended, or older than an answer
        self._changes[engine] = num_changes
        self._engines[engine] = epoch, now
        lacking = [one for name, one in self._adapters.items() if name not in now]
        if epoch > known:
            return lacking
        for name, state in now.items():
            earlier = before.get(name)
            if name not in self._adapters or (earlier is not None and earlier.digest != state.digest):
                self._adapters[name] = state  # loaded by way of another gateway
        for name in before.keys() - now.keys():
            self._adapters.pop(name, None)  # unloaded there
        return lacking if has_joined else []

    def lost(self, engine: str) -> None:
        """Counts nothing as loaded in an engine that is gone."""
        epoch, _ = self._engines.get(engine, (0, {}))
        self._engines[engine] = epoch, {}

    def of_engine(self, engine: str) -> list[AdapterState]:
        """Returns what an engine reported last, by name."""
        _, states = self._engines.get(engine, (0, {}))
        return [states[name] for name in sorted(states)]

    def nearest(self, name: str) -> tuple[bool, bool]:
        """Returns whether some engine has the adapter in a slot, and whether one has it in host memory."""
        found = [states[name] for _, states in self._engines.values() if name in states]
        return any(one.in_slot for one in found), any(one.in_host for one in found)


def ref_of(state: AdapterState) -> AdapterRef:
    """Returns how requests name an adapter to engines."""
    return AdapterRef(state.digest, state.path, state.num_bytes)
