"""Loads adapters into engines and drops them there, for operators and for requests that name one.

A load goes to every engine that serves, as a request of the gateway's own. Whoever waits for a name that is being
loaded waits for that load. Loads whose engine is lost begin again. Independent of gRPC; time is passed in with `beat`.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import TypeAlias

from sluice_server.engine.errors import Code, ServiceError, invalid, stage_lost
from sluice_server.engine.request import AdapterRef
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.adapters.registry import AdapterRegistry, ref_of
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.details import AdapterDropped, AdapterState
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import AdapterWork, DropAdapter, LoadAdapter

MAX_NAME_BYTES = 256
MAX_PATH_BYTES = 1024
MAX_LOADS = 64  # under way at once
LOAD_S = 120.0  # the most seconds of one

Answer: TypeAlias = AdapterState | AdapterDropped | ServiceError
OnAnswer: TypeAlias = Callable[[Answer], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Load:
    """A load or a drop that is under way.

    Attributes:
        own: the gateway's requests by engine.
        answers: the engines' answers so far.
        waiting: called with the first error, or else an engine's answer.
        is_dropped: the name was dropped meanwhile.
    """

    work: AdapterWork
    own: dict[str, OpenRequest]
    answers: list[Answer]
    waiting: list[OnAnswer]
    until_s: float
    is_dropped: bool = False


class Adapters:
    """The adapters of one gateway's service."""

    def __init__(self, manager: RequestManager, allows: Callable[[str, str], bool]) -> None:
        """`allows(tenant, name)`: whether requests of a tenant may name an adapter."""
        self.registry = AdapterRegistry()
        self.allows = allows
        self._manager = manager
        self._loads: list[_Load] = []

    def find(self, name: str, tenant: str) -> AdapterRef | None:
        """Returns the adapter of that name; None if it is to be loaded first. Raises ServiceError NOT_FOUND for a name
        that no folder can have, and for one that the tenant may not use."""
        if not self.allows(tenant, name) or not _may_be_path(name):
            raise unknown(name, self._manager.settings.model.id)
        state = self.registry.get(name)
        return None if state is None else ref_of(state)

    def when_loaded(self, name: str, tell: Callable[[AdapterRef | ServiceError], None]) -> None:
        """Calls `tell` when the folder of that name has been loaded, or with the error of the load."""

        model = self._manager.settings.model.id

        def told(answer: Answer) -> None:
            assert not isinstance(answer, AdapterDropped)
            if isinstance(answer, ServiceError):
                tell(unknown(name, model) if answer.code is Code.NOT_FOUND else answer)
            else:
                tell(ref_of(answer))

        self.load(LoadAdapter(name, name), told, joins=True)

    def load(self, work: LoadAdapter, tell: OnAnswer, *, joins: bool = False) -> None:
        """Loads an adapter into every engine that serves, then calls `tell`. `joins`: another load of that name that
        is under way will do."""
        check_name(work.name, self._manager.settings.model.id)
        for load in self._loads if joins else ():
            if isinstance(load.work, LoadAdapter) and load.work.name == work.name:
                load.waiting.append(tell)
                return
        if len(self._loads) >= MAX_LOADS:
            raise _too_many()
        self._begin(work, tell)

    def drop(self, name: str, tell: OnAnswer) -> AdapterState | None:
        """Forgets a name at once, and drops its adapter in every engine; then calls `tell`. Returns the adapter."""
        state = self.registry.remove(name)
        for load in self._loads:
            load.is_dropped = load.is_dropped or load.work.name == name
        self._begin(DropAdapter(name), tell)
        return state

    @property
    def is_loading(self) -> bool:
        """Whether loads or drops are under way."""
        return bool(self._loads)

    def is_known(self, name: str) -> bool:
        """Returns whether the name has an adapter, or is about to."""
        return self.registry.get(name) is not None or any(one.work.name == name for one in self._loads)

    def num_open(self, digest: bytes) -> int:
        """Returns the open requests of this gateway with that adapter."""
        wanted = digest.hex()
        return sum(one.envelope.adapter == wanted and one.outcome is None for one in self._manager.requests)

    def fail(self, digest: bytes, error: ServiceError) -> None:
        """Ends the open requests of this gateway with that adapter."""
        for one in self._manager.requests:
            if one.envelope.adapter == digest.hex():
                one.end(error)

    def reported(self, report: Report) -> None:
        """Takes an engine's report. What an engine lacks that has joined, or was started anew, is loaded there. A name
        that is being dropped is not learned again from a report that the engine sent before it heard of that."""
        if report.adapters is None:
            return
        dropping = {one.work.name for one in self._loads if isinstance(one.work, DropAdapter)}
        states = [one for one in report.adapters if one.name not in dropping]
        for state in self.registry.reported(report.engine_id, report.epoch, states, report.num_adapter_changes):
            work = LoadAdapter(state.name, state.path, state.digest, state.is_pinned)
            self._begin(work, _nothing, (report.engine_id,))

    def beat(self) -> None:
        """Gives up loads that take too long, and begins those again whose engine is lost."""
        serving, now_s = self._manager.engines.serving, self._manager.clock()
        for load in list(self._loads):
            for engine in [one for one in load.own if one not in serving]:
                self.registry.lost(engine)
                self._manager.close(load.own.pop(engine))
            if now_s > load.until_s:
                self._end(load, _took_too_long(load.work.name))
            elif not load.own:
                self._settle(load)

    def _begin(self, work: AdapterWork, tell: OnAnswer, engines: Collection[str] = ()) -> None:
        load = _Load(work, {}, [], [tell], self._manager.clock() + LOAD_S)
        self._loads.append(load)
        self._send(load, engines or self._manager.engines.serving)

    def _send(self, load: _Load, engines: Collection[str]) -> None:
        for engine in sorted(engines):
            call = CallMetadata(type(load.work).__name__)
            made = self._manager.open_own(call, TranslatedRequest(load.work), engine)
            load.own[engine] = made
            made.delivery.on_news = lambda engine=engine: self._answered(load, engine)  # type: ignore[misc] # bound now

    def _answered(self, load: _Load, engine: str) -> None:
        made = load.own.get(engine)
        if made is None or made.outcome is None:
            return
        del load.own[engine]
        outcome = made.outcome
        self._manager.close(made)
        assert isinstance(outcome, AdapterState | AdapterDropped | ServiceError)
        if not isinstance(outcome, ServiceError):
            self.registry.answered(engine, outcome.num_changes)
        load.answers.append(outcome)
        if not load.own and load in self._loads:
            self._settle(load)

    def _settle(self, load: _Load) -> None:
        """Ends a load that all engines have answered, or sends it again if none has."""
        errors = [one for one in load.answers if isinstance(one, ServiceError)]
        if errors and errors[0].code is not Code.UNAVAILABLE:
            self._end(load, errors[0])
        elif answers := [one for one in load.answers if not isinstance(one, ServiceError)]:
            self._end(load, answers[0])
        elif self._manager.engines.serving:
            load.answers.clear()
            self._send(load, self._manager.engines.serving)

    def _end(self, load: _Load, answer: Answer) -> None:
        self._loads.remove(load)
        if load.is_dropped and isinstance(answer, AdapterState):
            answer = _dropped(load.work.name)
        for made in load.own.values():
            self._manager.close(made)
        if isinstance(answer, AdapterState):
            self.registry.add(answer)
        elif isinstance(load.work, LoadAdapter) and any(isinstance(one, AdapterState) for one in load.answers):
            self._undo(load.work.name)
        for tell in load.waiting:
            tell(answer)

    def _undo(self, name: str) -> None:
        """Drops what some engines have loaded although others could not, unless the name had an adapter before."""
        if self.registry.get(name) is None:
            self._begin(DropAdapter(name), _nothing)


def check_name(name: str, model: str) -> None:
    """Raises ServiceError for a name that an adapter cannot have."""
    size = len(name.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        raise invalid("adapter", f"has {size} bytes; 1 to {MAX_NAME_BYTES} are allowed", limit=MAX_NAME_BYTES)
    if ":" in name or not name.isprintable():
        raise invalid("adapter", f"{name[:64]!r} has a colon or a character that cannot be printed: use another name")
    if name == model:
        raise invalid("adapter", f"{name[:64]!r} is the name of the model: use another name")


def unknown(name: str, model: str) -> ServiceError:
    """Returns the error for an adapter that does not exist, or that a tenant may not use: both look the same. It names
    the model that would take it: whoever gave the name as a model's may have meant that."""
    text = f"it is neither loaded nor a folder of the adapters for the model {model!r}, which this server serves"
    return not_found("adapter", name, f"{text}; see ListAdapters")


def _may_be_path(name: str) -> bool:
    """Whether a folder of adapters may have that name."""
    return (
        0 < len(name.encode()) <= MAX_NAME_BYTES
        and name.isprintable()
        and name[0] != "/"
        and ".." not in name.split("/")
    )


def _too_many() -> ServiceError:
    text = f"adapter: {MAX_LOADS} adapters are being loaded, as many as may be at once: try again later"
    return ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", text, field="adapter", retry_after_s=1.0)


def _took_too_long(name: str) -> ServiceError:
    error = stage_lost("engine")
    text = f"adapter: {name!r} was not loaded within {LOAD_S:.0f} s: try again later"
    return ServiceError(error.code, error.reason, text, field="adapter", retry_after_s=error.retry_after_s)


def _dropped(name: str) -> ServiceError:
    text = f"adapter: {name!r} was unloaded while it was being loaded"
    return ServiceError(Code.ABORTED, "ADAPTER_UNLOADED", text, field="adapter")


def _nothing(answer: Answer) -> None:
    """Takes an answer that no caller waits for."""
