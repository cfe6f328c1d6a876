"""Assembles a gateway: the gRPC server, the request manager, health, and the periodic task that checks the ring.

To the ring it is a stage, which takes messages through `handle`. The rest of the process calls `start`, `stop` and
`lost`. Messages go out through `emit`, which never blocks. Everything runs on one event loop.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Set
from typing import Any

from grpc_health.v1 import health, health_pb2

from sluice_server.services.config import KV_COST
from sluice_server.services.gateway.access.identity import AccessPolicy, access_of, read_access
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.access.rate import Rate
from sluice_server.services.gateway.adapters.loads import Adapters
from sluice_server.services.gateway.cache_events import CacheEvents, names_only
from sluice_server.services.gateway.calls import server
from sluice_server.services.gateway.calls.adapters import AdapterHandlers
from sluice_server.services.gateway.calls.cache import CacheCalls
from sluice_server.services.gateway.calls.control import Control
from sluice_server.services.gateway.calls.converse import Converse
from sluice_server.services.gateway.calls.guard import Guard
from sluice_server.services.gateway.calls.inference import Inference
from sluice_server.services.gateway.calls.large import LargeRequestQueue
from sluice_server.services.gateway.calls.peers import PeerGateways
from sluice_server.services.gateway.calls.profile import ProfileCalls
from sluice_server.services.gateway.connections.floods import floods
from sluice_server.services.gateway.connections.listener import PortListener
from sluice_server.services.gateway.connections.memory import MallocTrim
from sluice_server.services.gateway.contract.errors import draining
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.gateway.oip.service import OpenInference
from sluice_server.services.gateway.oip.statistics import GenerationCounts
from sluice_server.services.gateway.operations import RemoteOperations
from sluice_server.services.gateway.recovery.watch import ReadModel, RingWatch, WatchInputs
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.gateway.vllm.listening import listener as vllm_listener
from sluice_server.services.gateway.vllm.service import SERVICE as VLLM
from sluice_server.services.gateway.vllm.service import VllmEngine
from sluice_server.services.memory.level import Level
from sluice_server.services.messages.control import OperationAnswer
from sluice_server.services.messages.messages import Failed, Grant, Message, Preempted, Result, Text
from sluice_server.services.messages.processes import CacheChanges, Mismatch, Probe, Report
from sluice_server.services.process.engine_table import EngineTable
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry.observed import Observer, Unobserved

OF_REQUESTS = (Text, Failed, Result, Preempted)
MOST_RESETS = 1024  # calls that an address may cancel at once, or twice as many as may be open
HEDGE_LOOK_S = 0.01  # between two looks for slow requests, at least
FLUSH_S = 1.0  # to send the last statuses; also ends health watchers, which never end by themselves


class Gateway:
    """A gateway: construct it, `start` it, pass ring messages to `handle`, `stop` it."""

    def __init__(
        self,
        settings: GatewaySettings,
        emit: Callable[[Message], None],
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        lost_frames: Callable[[], int] = lambda: 0,
        read_model: ReadModel = lambda revision: None,
    ) -> None:
        """`lost_frames` counts frames of the ring that never arrived. `read_model`: see `WatchInputs`. Raises
        `ServiceError` for an access file that cannot be used."""
        self._settings = settings
        self._clock = clock
        self._emit = emit
        self._access = access = _access(settings)
        observer = self._counts = GenerationCounts(observer or Unobserved(), clock)
        self._guard = Guard(access, clock, observer, settings.peer_secret)
        quotas = _quotas(access, settings.num_gateways)
        self.manager = RequestManager(settings, emit, observer, clock, quotas)
        self._detached = DetachedSessions(self.manager, _call_later, settings.max_open_requests)
        self._peers = PeerGateways(settings.gateway_id, settings.peers, settings.peer_secret)
        self._cache_events = CacheEvents(settings.gateway_id, emit, clock)
        processes = [name for stage in settings.stages for name in stage] + list(settings.gateways)
        self._operations = RemoteOperations(settings.gateway_id, settings.epoch, processes, emit)
        self.adapters = _adapters(self.manager, quotas)
        named = AdapterHandlers(self.manager, self.adapters)
        self._control = Control(self.manager, self.drain, self._cache_events, named)
        first_engine = lambda: next(iter(self.manager.engines.ids), "")  # noqa: E731 # for both
        self._profiles = ProfileCalls(self._operations, first_engine)
        self._caches = CacheCalls(self._operations, lambda: self.manager.engines.ids)
        self.memory_level: Callable[[], Level] = lambda: Level.OK  # of this process's control group
        self.manager.is_memory_short = lambda: self._control.loads.memory_level(self.memory_level()) is Level.CRITICAL
        self._control.loads.own_level = lambda: self.memory_level()
        self._nudge, self.progress = asyncio.Event(), 0  # set when a change is to be published at once
        inputs = WatchInputs(lambda: self._control.loads.step_s, lost_frames, read_model, self._nudge.set)
        self._watch = RingWatch(self.manager, settings, emit, clock, inputs)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Grant: self.manager.take_back,
            Probe: self._watch.returned,
            Report: self._reported,
            CacheChanges: self._cache_changed,
            Mismatch: self._watch.mismatched,
            OperationAnswer: self._operations.handle,
        }
        self._health = health.aio.HealthServicer()
        most = max(MOST_RESETS, 2 * settings.max_open_requests), settings.max_connections_per_address
        self._floods = floods(*most, clock, lambda: self.manager.observer.count("connection_cut"))
        self._spare = MallocTrim(clock)
        self._listeners: list[PortListener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._was_serving: bool | None = None
        self._has_said_so = False
        self._port = 0
        self.vllm_port = 0  # of `vllm_listen`
        self.on_serving: Callable[[int], None] = lambda port: None  # when all engines serve, also after a loss
        self.on_engines: Callable[[Set[str], Set[str]], None] = lambda serving, drained: None  # when one changes
        self._told_engines: tuple[Set[str], Set[str]] = frozenset(), frozenset()

    @property
    def is_serving(self) -> bool:
        """Whether new requests are admitted."""
        return self.manager.refusal is None

    async def start(self) -> int:
        """Listens and begins to probe the ring; returns the port. Raises `ServiceError` LISTEN_FAILED."""
        service, observer = GenerationService(self.manager, self._detached), self.manager.observer
        large = LargeRequestQueue(time.thread_time)
        inference = Inference(service, self._peers, observer, large)
        converse = Converse(service, observer, lambda: Rate(self._settings.max_stream_frames_per_s, self._clock))
        adapter = OpenInference(service, self.manager, self._counts)
        control = self._control, self._profiles, self._caches
        handlers = server.Handlers(inference, converse, *control, adapter, observer, large)
        given_up = self._floods.given_up
        services = handlers.services()
        build = functools.partial(server.build, self._settings, self._guard, services, self._health, given_up)
        self._listeners = [PortListener(self._settings, build)]
        if self._settings.vllm_listen:
            self._listeners.append(self._vllm_listener(service))
        await self._publish()
        self._port, *others = [await listener.start() for listener in self._listeners]
        self.vllm_port = others[0] if others else 0
        self._tasks = [asyncio.create_task(self._beat(), name="gateway pulse")]
        if self._settings.hedging_delay_s:
            self._tasks.append(asyncio.create_task(self._hedge(), name="gateway hedging"))
        return self._port

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, waits up to `grace_s` for the running ones, then shuts down."""
        await self.drain(grace_s)
        await asyncio.gather(*[listener.stop(FLUSH_S) for listener in self._listeners])
        await self._peers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._floods.close()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits up to `grace_s` for the running ones, then fails them. The server stays up and
        answers DRAINING."""
        self.manager.drain()
        await self._publish()
        await self._emptied(grace_s)
        self.manager.fail_all(draining())

    def _reported(self, report: Report) -> None:
        if report.engine_id not in self.manager.engines.ids:
            return  # it has left, or this gateway has not heard of it yet
        self._control.loads.report(report)
        self.adapters.reported(report)
        self.manager.engines.learn(report.engine_id, report.role)
        self._cache_events.take_report(report)
        if self._settings.routing == KV_COST:
            self._emit(report)

    def _cache_changed(self, changes: CacheChanges) -> None:
        if changes.engine_id not in self.manager.engines.ids:
            return
        self._cache_events.handle(changes)
        if self._settings.routing == KV_COST:
            self._emit(names_only(changes))

    def _vllm_listener(self, service: GenerationService) -> PortListener:
        engine = VllmEngine(service, self.manager, self._control.loads, self._control.artifacts)
        observer = self.manager.observer
        return vllm_listener(self._settings, self._access, self._clock, engine, self._health, observer)

    def handle(self, message: Message) -> None:
        """Handles a message from the ring, without waiting. Raises TypeError for a type that gateways do not take."""
        self.progress += 1
        if isinstance(message, OF_REQUESTS):
            self.manager.handle(message)
            self._watch.send_pending()
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

    def lost(self, names: Set[str] = frozenset(), *, planned: bool = False) -> None:
        """Handles the loss of these processes of the ring; without names, of an unknown one. Their requests go on at
        other engines, or new ones are refused and open ones wait until the ring works again."""
        self._has_said_so = False
        self._cache_events.lost(names)
        self._operations.lost(names)
        self._watch.lost(names, planned=planned)

    def change_engines(self, engines: EngineTable) -> None:
        """Makes these the engines of the ring: some have joined, some have left, some are draining."""
        left = set(self.manager.engines.ids) - engines.keys()
        self._watch.change_engines(engines.keys(), {name for name, entry in engines.items() if entry.draining})
        self._operations.change_engines(left, engines.keys())
        self._cache_events.left(left)
        self._control.loads.left(left)

    async def _beat(self) -> None:
        interval_s = self._settings.probe_interval_s
        last_s = self._clock()
        while True:
            self._nudge.clear()
            now_s = self._clock()
            elapsed_s = min(now_s - last_s, 2 * interval_s)  # a pause of this process must not count as a stalled peer
            last_s = now_s
            self.manager.release_stuck(elapsed_s)
            self._watch.beat(elapsed_s)
            self.adapters.beat()
            await self._publish()
            self._floods.beat(self._port)
            self._spare.beat()
            for listener in self._listeners:
                if await listener.look_after():
                    self.manager.observer.count("listener_replaced")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._nudge.wait()

    async def _hedge(self) -> None:
        while True:
            await asyncio.sleep(max(HEDGE_LOOK_S, self._settings.hedging_delay_s / 4))
            self.manager.hedge()

    async def _publish(self) -> None:
        serving = self.is_serving
        if serving and self._watch.is_whole and not self._has_said_so:
            self._has_said_so = True
            self.on_serving(self._port)
        engines = self.manager.engines.serving, self._watch.drained
        if engines != self._told_engines:
            self._told_engines = engines
            self.on_engines(*engines)
        if serving is self._was_serving:
            return
        self._was_serving = serving
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if serving else status.NOT_SERVING
        alive = status.NOT_SERVING if self.manager.is_draining else status.SERVING
        of_vllm = (VLLM.full_name,) if self._settings.vllm_listen else ()
        for name in ("", *server.LISTED, *of_vllm):
            await self._health.set(name, alive if name in server.WHILE_NOT_SERVING else now)

    async def _emptied(self, grace_s: float) -> None:
        empty = asyncio.Event()
        self.manager.on_empty = empty.set
        if len(self.manager.requests):
            try:
                async with asyncio.timeout(grace_s):
                    await empty.wait()
            except TimeoutError:
                return


def _adapters(manager: RequestManager, quotas: Quotas) -> Adapters:
    """Returns the adapters that the requests of a gateway may name."""
    found = Adapters(manager, quotas.allows_adapter)
    if manager.settings.limits.max_adapters:
        manager.adapters = found
    return found


def _call_later(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _access(settings: GatewaySettings) -> WatchedFile[AccessPolicy] | None:
    path = settings.access_file
    if path is not None:
        return WatchedFile((path,), lambda: read_access(path))
    keys = settings.api_keys
    return WatchedFile((), lambda: access_of(keys)) if keys else None


def _quotas(access: WatchedFile[AccessPolicy] | None, num_gateways: int) -> Quotas:
    if access is None:
        return Quotas(lambda tenant: TenantLimits(), num_gateways)
    return Quotas(lambda tenant: access.value.limits_of(tenant), num_gateways)
