"""One model behind a gateway: its open requests, and the watch over the ring of processes that computes them.

To that ring it is the gateway's stage, which takes messages through `handle`; messages go out through `emit`, which
never blocks. Several lanes of a gateway share its books, observer and clock, and nothing else: the loss of a process is
its lane's. Everything runs on one event loop.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Set
from typing import Any

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import KV_COST
from sluice_server.services.gateway.adapters.loads import Adapters
from sluice_server.services.gateway.cache_events import CacheEvents, names_only
from sluice_server.services.gateway.calls.adapters import AdapterHandlers
from sluice_server.services.gateway.calls.artifacts import Artifacts
from sluice_server.services.gateway.calls.load import Loads
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.models.waiting import Rest, WaitingRequests
from sluice_server.services.gateway.oip.statistics import GenerationCounts
from sluice_server.services.gateway.operations import RemoteOperations
from sluice_server.services.gateway.recovery.watch import ReadModel, RingWatch, WatchInputs
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.memory.level import Level
from sluice_server.services.messages.control import OperationAnswer
from sluice_server.services.messages.messages import Failed, Grant, Message, Preempted, Result, Text
from sluice_server.services.messages.processes import CacheChanges, Mismatch, Probe, Report
from sluice_server.services.process.engine_table import EngineTable
from sluice_server.services.telemetry.observed import Observer

OF_REQUESTS = (Text, Failed, Result, Preempted)


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The ring of a lane, as its gateway's process has it.

    Attributes:
        emit: sends a message into it.
        lost_frames: counts the frames that never arrived.
        read_model: see `WatchInputs`.
    """

    emit: Callable[[Message], None]
    lost_frames: Callable[[], int] = lambda: 0
    read_model: ReadModel = lambda revision: None


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What the lanes of a gateway share.

    Attributes:
        allows_adapter: whether requests of a tenant may name an adapter.
        memory_level: of the gateway's process.
        on_change: called when there is something to publish.
    """

    books: Books
    observer: Observer
    clock: Callable[[], float]
    allows_adapter: Callable[[str, str], bool]
    memory_level: Callable[[], Level]
    on_change: Callable[[], None]


class Lane:
    """A lane: construct it, pass messages of its ring to `handle`, call `beat`; `end` fails what is open."""

    def __init__(self, name: str, settings: GatewaySettings, ring: Ring, shared: Shared) -> None:
        self.name = name
        self.is_leaving = False
        self.leaves = 0  # how often it was asked to leave or to sleep, as far as it knows
        self.progress = 0
        self.counts = GenerationCounts(shared.observer, shared.clock)
        self.manager = RequestManager(settings, ring.emit, self.counts, shared.clock, shared.books)
        self.detached = DetachedSessions(self.manager, _call_later, settings.max_open_requests)
        self.cache_events = CacheEvents(settings.gateway_id, ring.emit, shared.clock)
        self.processes = frozenset(name for stage in settings.stages for name in stage)
        processes = [*self.processes, *settings.gateways]
        self.operations = RemoteOperations(settings.gateway_id, settings.epoch, processes, ring.emit)
        self.adapters = _adapters(self.manager, shared.allows_adapter)
        self.named_adapters = AdapterHandlers(self.manager, self.adapters)
        self.loads = Loads(self.manager, self.named_adapters.of_engine)
        self.artifacts = Artifacts(self.manager, self.cache_events)
        self.loads.own_level = shared.memory_level
        self.manager.is_memory_short = lambda: self.loads.memory_level(shared.memory_level()) is Level.CRITICAL
        self._emit = ring.emit
        self._answered = self.manager.answers.handle
        self._routes_by_caches = settings.routing == KV_COST
        inputs = WatchInputs(lambda: self.loads.step_s, ring.lost_frames, ring.read_model, shared.on_change)
        self.watch = RingWatch(self.manager, settings, ring.emit, shared.clock, inputs)
        self.waiting = WaitingRequests(self.manager, self.watch, settings.model_wait_s, shared.on_change)
        self._clock = shared.clock
        self._handlers: dict[type, Callable[[Any], None]] = {
            Grant: self.manager.changes.take_back,
            Probe: self.watch.returned,
            Report: self._reported,
            CacheChanges: self._cache_changed,
            Mismatch: self.watch.mismatched,
            OperationAnswer: self.operations.handle,
        }
        self._has_said_so = False
        self._told_engines: tuple[Set[str], Set[str]] = frozenset(), frozenset()
        self.on_serving: Callable[[], None] = lambda: None  # when all engines serve, also after a loss
        self.on_engines: Callable[[Set[str], Set[str]], None] = lambda serving, drained: None  # when one changes

    @property
    def is_serving(self) -> bool:
        """Whether new requests are sent to the ring at once."""
        return self.manager.refusal is None and not self.waiting.is_resting

    @property
    def is_up(self) -> bool:
        """Whether all of its ring serves, also if this gateway drains and takes no new requests."""
        is_refused = self.manager.refusal is not None and not self.manager.is_draining
        return self.watch.is_whole and not is_refused and not self.waiting.is_resting

    @property
    def id(self) -> str:
        """The model's name in requests."""
        return self.manager.settings.model.id

    def answer_to(self, aliases: frozenset[str]) -> None:
        """Lets requests give the model these names, too."""
        settings = self.manager.settings
        if settings.model.aliases != aliases:
            model = dataclasses.replace(settings.model, aliases=aliases)
            self.manager.settings = dataclasses.replace(settings, model=model)

    def handle(self, message: Message) -> None:
        """Handles a message from the ring, without waiting. Raises TypeError for a type that gateways do not take."""
        self.progress += 1
        if isinstance(message, OF_REQUESTS):
            self._answered(message)
            self.watch.send_pending()
            return
        handle = self._handlers.get(type(message))
        if handle is None:
            raise TypeError(f"a gateway takes no {type(message).__name__}")
        handle(message)

    def turn(self) -> bool:
        """Returns False: a gateway has no work between messages."""
        return False

    def reap(self) -> None:
        """Does nothing: the requests are this gateway's own."""

    def beat(self, elapsed_s: float) -> None:
        """Goes on with what takes time; called every `elapsed_s` seconds."""
        self.manager.release_stuck(elapsed_s)
        if self.waiting.rest is not Rest.ASLEEP:  # there is no ring to probe
            self.watch.beat(elapsed_s)
        self.adapters.beat()

    def publish(self) -> None:
        """Calls `on_serving` and `on_engines` for what is new."""
        self.waiting.beat(self._clock())
        if self.is_serving and self.watch.is_whole and not self._has_said_so:
            self._has_said_so = True
            self.on_serving()
        engines = self.manager.engines.serving, self.watch.drained
        if engines != self._told_engines:
            self._told_engines = engines
            self.on_engines(*engines)

    def lost(self, names: Set[str] = frozenset(), *, planned: bool = False) -> None:
        """Handles the loss of these processes of the ring; without names, of an unknown one. Their requests go on at
        other engines, or new ones are refused and open ones wait until the ring works again."""
        self._has_said_so = False
        self.cache_events.lost(names)
        self.operations.lost(names)
        self.watch.lost(names, planned=planned)

    def change_engines(self, engines: EngineTable) -> None:
        """Makes these the engines of the ring: some have joined, some have left, some are draining."""
        left = set(self.manager.engines.ids) - engines.keys()
        self.processes = (self.processes - left) | engines.keys()
        self.watch.change_engines(engines.keys(), {name for name, entry in engines.items() if entry.draining})
        self.operations.change_engines(left, engines.keys())
        self.cache_events.left(left)
        self.loads.left(left)

    async def emptied(self, grace_s: float) -> None:
        """Waits until no request is open, for at most `grace_s`."""
        empty = asyncio.Event()
        self.manager.on_empty = empty.set
        if len(self.manager.requests):
            try:
                async with asyncio.timeout(grace_s):
                    await empty.wait()
            except TimeoutError:
                return

    def end(self, error: ServiceError) -> None:
        """Ends what is open with `error`."""
        self.manager.drain()
        self.manager.fail_all(error)

    def _reported(self, report: Report) -> None:
        if report.engine_id not in self.manager.engines.ids:
            return  # it has left, or this gateway has not heard of it yet
        self.loads.report(report)
        self.adapters.reported(report)
        self.manager.engines.learn(report.engine_id, report.role)
        self.cache_events.take_report(report)
        if self._routes_by_caches:
            self._emit(report)

    def _cache_changed(self, changes: CacheChanges) -> None:
        if changes.engine_id not in self.manager.engines.ids:
            return
        self.cache_events.handle(changes)
        if self._routes_by_caches:
            self._emit(names_only(changes))


def _adapters(manager: RequestManager, allows: Callable[[str, str], bool]) -> Adapters:
    """Returns the adapters that the requests of a lane may name."""
    found = Adapters(manager, allows)
    if manager.settings.limits.max_adapters:
        manager.adapters = found
    return found


def _call_later(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback)
