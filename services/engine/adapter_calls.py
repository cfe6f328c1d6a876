"""Loads and drops adapters for gateways, and tells which the engine has under which names.

A load is read on the loader's thread and answered in a later turn. The last load of a name counts; the adapter that had
the name before is dropped once no request has it.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from sluice_server.engine.adapters.loader import LoadedAdapter
from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.services.faults import fault
from sluice_server.services.messages.details import AdapterDropped, AdapterState
from sluice_server.services.messages.messages import AdapterCall, Envelope, Message, Result, failed
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import LoadAdapter
from sluice_server.services.telemetry.logs import about

Emit = Callable[[Message], None]
MAX_NAMES = 1024  # of adapters in one engine
TELL_EVERY = 8  # reports: a gateway that was just started learns of adapters so


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A load that is being read."""

    envelope: Envelope
    work: LoadAdapter
    reading: "Future[LoadedAdapter]"


class AdapterCalls:
    """The names of one engine's adapters."""

    def __init__(self, engine: Engine, emit: Emit) -> None:
        self.num_changes = 0  # to names
        self._manager = engine.adapters
        self._emit = emit
        self._loads: list[_Load] = []  # in the order in which they came
        self._named: dict[str, AdapterState] = {}
        self._told: tuple[AdapterState, ...] = ()
        self._num_untold = 0

    def handle(self, call: AdapterCall) -> None:
        """Begins a load, or drops an adapter."""
        if self._manager is None:
            self._emit(failed(call.envelope, unsupported("adapter", NOT_TAKEN)))
        elif isinstance(call.work, LoadAdapter):
            if len(self._named) + len(self._loads) >= MAX_NAMES and call.work.name not in self._named:
                self._emit(failed(call.envelope, _too_many()))
                return
            self._loads.append(_Load(call.envelope, call.work, self._manager.read(call.work.path)))
        else:
            self._drop(self._manager, call.work.name)
            self.num_changes += 1
            self._emit(Result(call.envelope, AdapterDropped(self.num_changes)))

    def turn(self) -> None:
        """Answers the loads that have been read, in their order."""
        while self._manager is not None and self._loads and self._loads[0].reading.done():
            load = self._loads.pop(0)
            try:
                self._emit(Result(load.envelope, self._finish(self._manager, load)))
            except ServiceError as error:
                self._emit(failed(load.envelope, _about(load.work.name, error)))
            except Exception as error:
                what = "failed while it loaded this adapter"
                self._emit(failed(load.envelope, fault(Role.ENGINE, about(load.envelope), what, error)))

    def changed(self) -> tuple[AdapterState, ...] | None:
        """Returns all names for a report; None where nothing has changed since the last few."""
        if self._manager is None:
            return None
        states = self._states(self._manager)
        self._num_untold += 1
        if states == self._told and self._num_untold < TELL_EVERY:
            return None
        self._told, self._num_untold = states, 0
        return states

    def _finish(self, manager: AdapterManager, load: _Load) -> AdapterState:
        work, loaded = load.work, load.reading.result()
        if work.digest not in (b"", loaded.digest):
            raise _other_digest(work, loaded.digest)
        manager.add(loaded, is_pinned=work.is_pinned)
        before = self._named.get(work.name)
        state = AdapterState(
            work.name, loaded.path, loaded.digest, loaded.rank, loaded.modules, loaded.num_bytes, work.is_pinned
        )
        self._named[work.name] = state
        self.num_changes += 1
        if before is not None:
            self._drop_unnamed(manager, before.digest)
        found = next(one for one in self._states(manager) if one.name == work.name)
        return msgspec.structs.replace(found, num_changes=self.num_changes)

    def _drop(self, manager: AdapterManager, name: str) -> None:
        """Forgets a name, and ends the loads of it."""
        for load in [one for one in self._loads if one.work.name == name]:
            load.reading.cancel()
            self._loads.remove(load)
            text = f"adapter: {name!r} was unloaded while it was being loaded"
            self._emit(failed(load.envelope, ServiceError(Code.ABORTED, "ADAPTER_UNLOADED", text, field="adapter")))
        state = self._named.pop(name, None)
        if state is not None:
            self._drop_unnamed(manager, state.digest)

    def _drop_unnamed(self, manager: AdapterManager, digest: bytes) -> None:
        """Drops an adapter unless it has another name."""
        if all(one.digest != digest for one in self._named.values()):
            manager.drop(digest)

    def _states(self, manager: AdapterManager) -> tuple[AdapterState, ...]:
        where = {one.digest: one for one in manager.residencies()}
        found = []
        for state in self._named.values():
            at = where.get(state.digest)
            in_slot, in_host = (False, False) if at is None else (at.in_slot, at.in_host)
            found.append(msgspec.structs.replace(state, in_slot=in_slot, in_host=in_host))
        return tuple(found)


def _about(name: str, error: ServiceError) -> ServiceError:
    """Returns the error of a load with the name that was to be loaded."""
    text = f"adapter {name!r}: {error.message.removeprefix('adapter: ')}"
    return ServiceError(error.code, error.reason, text, field=error.field, details=error.details)


NOT_TAKEN = "adapter: this server was not started with --max-adapters"


def _too_many() -> ServiceError:
    text = f"adapter: {MAX_NAMES} adapters have names here, as many as an engine takes: unload one first"
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_CAPACITY", text, field="adapter")


def _other_digest(work: LoadAdapter, found: bytes) -> ServiceError:
    text = f"expected_digest: {work.path!r} has the digest {found.hex()}, not {work.digest.hex()}"
    details = {"actual": found.hex(), "limit": work.digest.hex()}
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_CHANGED", text, field="expected_digest", details=details)
