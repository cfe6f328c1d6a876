"""Assembles a gateway: the gRPC server, the models behind it, health, and the periodic task that checks their rings.

Each model is a lane (`models.lane`), which is opened and closed while the gateway runs. Everything runs on one event
loop.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable

from grpc_health.v1 import health, health_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.identity import AccessPolicy, access_of, read_access
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.access.rate import Rate
from sluice_server.services.gateway.calls import server
from sluice_server.services.gateway.calls.audit import audited
from sluice_server.services.gateway.calls.cache import CacheCalls
from sluice_server.services.gateway.calls.control import Control
from sluice_server.services.gateway.calls.converse import Converse
from sluice_server.services.gateway.calls.guard import Guard
from sluice_server.services.gateway.calls.inference import Inference
from sluice_server.services.gateway.calls.large import LargeRequestQueue
from sluice_server.services.gateway.calls.models import ModelCalls
from sluice_server.services.gateway.calls.peers import PeerGateways
from sluice_server.services.gateway.calls.profile import ProfileCalls
from sluice_server.services.gateway.connections.floods import floods
from sluice_server.services.gateway.connections.listener import PortListener
from sluice_server.services.gateway.connections.memory import MallocTrim
from sluice_server.services.gateway.contract.errors import draining
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.gateway.models.known import KnownModels, OneModel
from sluice_server.services.gateway.models.lane import Lane, Ring, Shared
from sluice_server.services.gateway.models.operations import LaneOperations
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.gateway.oip.service import OpenInference
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.gateway.vllm.listening import listener as vllm_listener
from sluice_server.services.gateway.vllm.service import SERVICE as VLLM
from sluice_server.services.gateway.vllm.service import VllmEngine
from sluice_server.services.memory.level import Level
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry.observed import Observer, Unobserved

MOST_RESETS = 1024  # calls that an address may cancel at once, or twice as many as may be open
HEDGE_LOOK_S = 0.01  # between two looks for slow requests, at least
FLUSH_S = 1.0  # to send the last statuses; also ends health watchers, which never end by themselves


class Gateway:
    """A gateway: construct it, `open` its models, `start` it, `stop` it."""

    def __init__(
        self,
        settings: GatewaySettings,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ServiceError` for an access file that cannot be used."""
        self._settings = settings
        self._clock = clock
        self._access = access = _access(settings)
        self.observer = observer = observer or Unobserved()
        self._guard = audited(Guard(access, clock, observer, settings.peer_secret), settings, clock)
        quotas = _quotas(access, settings.num_gateways)
        self.books = Books(settings, quotas, clock)
        self.lanes: dict[str, Lane] = {}
        self.models = Models(self.lanes, self.books)
        self.memory_level: Callable[[], Level] = lambda: Level.OK  # of this process's control group
        self._nudge = asyncio.Event()  # set when a change is to be published at once
        level = lambda: self.memory_level()  # noqa: E731 # it is set later
        self._shared = Shared(self.books, observer, clock, quotas.allows_adapter, level, self._nudge.set)
        self._peers = PeerGateways(settings.gateway_id, settings.peers, settings.peer_secret)
        self.service = GenerationService(self.models, observer)
        self._health = health.aio.HealthServicer()
        most = max(MOST_RESETS, 2 * settings.max_open_requests), settings.max_connections_per_address
        self._floods = floods(*most, clock, lambda: observer.count("connection_cut"))
        self._spare = MallocTrim(clock)
        self._listeners: list[PortListener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._was_serving: bool | None = None
        self.on_published: Callable[[], None] = lambda: None  # whenever something may have changed
        self.known: KnownModels = OneModel()
        self.port = 0
        self.vllm_port = 0  # of `vllm_listen`

    @property
    def is_serving(self) -> bool:
        """Whether new requests of the default model are admitted."""
        try:
            return self.models.first.is_serving
        except ServiceError:
            return False

    @property
    def is_listening(self) -> bool:
        """Whether it has started."""
        return bool(self._tasks)

    def nudge(self) -> None:
        """Publishes a change at once."""
        self._nudge.set()

    def open(self, name: str, settings: GatewaySettings, ring: Ring) -> Lane:
        """Opens a lane, whose model requests may name from now on."""
        lane = self.lanes[name] = Lane(name, settings, ring, self._shared)
        if self.books.leaving:
            lane.manager.drain()
        self._nudge.set()
        return lane

    def close(self, name: str) -> None:
        """Forgets a lane; what it has open was ended."""
        del self.lanes[name]

    def handlers(self) -> server.Handlers:
        """Returns the handlers of the contract and of the Open Inference Protocol."""
        service, observer = self.service, self.observer
        large = LargeRequestQueue(time.thread_time)
        inference = Inference(service, self._peers, observer, large)
        converse = Converse(service, observer, lambda: Rate(self._settings.max_stream_frames_per_s, self._clock))
        adapter = OpenInference(service, self.models, observer, self._settings.version)
        operations = LaneOperations(self.models)
        operators = (
            ProfileCalls(operations, lambda: next(iter(operations.engines()), "")),
            CacheCalls(operations, operations.engines),
        )
        control = Control(self._settings, self.models, self.drain)
        models = ModelCalls(self.models, self.known)
        return server.Handlers(inference, converse, control, models, *operators, adapter, observer, large)

    async def start(self) -> int:
        """Listens and begins to probe the rings; returns the port. Raises `ServiceError` LISTEN_FAILED."""
        services, given_up = self.handlers().services(), self._floods.given_up
        build = functools.partial(server.build, self._settings, self._guard, services, self._health, given_up)
        self._listeners = [PortListener(self._settings, build)]
        if self._settings.vllm_listen:
            self._listeners.append(self._vllm_listener())
        await self._publish()
        self.port, *others = [await listener.start() for listener in self._listeners]
        self.vllm_port = others[0] if others else 0
        self._tasks = [asyncio.create_task(self._beat(), name="gateway pulse")]
        if self._settings.hedging_delay_s:
            self._tasks.append(asyncio.create_task(self._hedge(), name="gateway hedging"))
        return self.port

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
        self.leave()
        await self._publish()
        await asyncio.gather(*[lane.emptied(grace_s) for lane in self.models])
        self.end_all(draining())

    def end_all(self, error: ServiceError) -> None:
        """Refuses new requests, and ends all that is open with `error`."""
        self.leave()
        for lane in self.models:
            lane.end(error)

    def leave(self) -> None:
        """Refuses new requests from now on, and tells the open streams."""
        for lane in self.models:
            lane.manager.drain()
        self.books.go_away(draining().message)

    def _vllm_listener(self) -> PortListener:
        engine = VllmEngine(self.service, self.models.first, self._clock)
        return vllm_listener(self._settings, self._access, self._clock, engine, self._health, self.observer)

    async def _beat(self) -> None:
        interval_s = self._settings.probe_interval_s
        last_s = self._clock()
        while True:
            self._nudge.clear()
            now_s = self._clock()
            elapsed_s = min(now_s - last_s, 2 * interval_s)  # a pause of this process must not count as a stalled peer
            last_s = now_s
            self.books.num_generating = sum(lane.manager.num_generating for lane in self.models)
            for lane in self.models:
                lane.beat(elapsed_s)
            await self._publish()
            self._floods.beat(self.port)
            self._spare.beat()
            for listener in self._listeners:
                if await listener.look_after():
                    self.observer.count("listener_replaced")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._nudge.wait()

    async def _hedge(self) -> None:
        while True:
            await asyncio.sleep(max(HEDGE_LOOK_S, self._settings.hedging_delay_s / 4))
            for lane in self.models:
                lane.manager.hedge()

    async def _publish(self) -> None:
        for lane in self.models:
            lane.publish()
        self.on_published()
        serving = self.is_serving
        if serving is self._was_serving:
            return
        self._was_serving = serving
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if serving else status.NOT_SERVING
        alive = status.NOT_SERVING if self.books.leaving else status.SERVING
        of_vllm = (VLLM.full_name,) if self._settings.vllm_listen else ()
        for name in ("", *server.LISTED, *of_vllm):
            await self._health.set(name, alive if name in server.WHILE_NOT_SERVING else now)


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
