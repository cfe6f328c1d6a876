"""The implemented handlers of ControlService: models, server info, load, drain."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.adapters import AdapterCalls
from sluice_server.services.gateway.calls.described import features, server_limits
from sluice_server.services.gateway.calls.load import whole_load
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.gateway.settings import GatewaySettings

SCHEMA_REVISION = 20
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0  # intervals of WatchLoad
MAX_GRACE_S = 24 * 3600.0
DRAIN_INTERVAL_S = 0.25  # between two reports of Drain


class Control:
    """The handlers. `drain` makes the gateway refuse new requests and ends the running ones after so many seconds."""

    def __init__(
        self, settings: GatewaySettings, models: Models[Lane], drain: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        self.adapters = AdapterCalls(models)
        self._settings = settings
        self._models = models
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._start_time = Timestamp(seconds=int(time.time()))

    async def get_tokenizer(self, request: control_pb2.GetTokenizerRequest, context: Context) -> None:
        """GetTokenizer: writes the files as a zip in chunks; NOT_FOUND for a model that is not served."""
        one = await self._known(request.model, context)

        async def write(data: bytes, digest: str) -> None:
            await context.write(control_pb2.GetTokenizerResponse(data=data, sha256=digest))

        await one.artifacts.write_tokenizer(context, write)

    async def subscribe_kv_events(self, request: control_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        """SubscribeKvEvents: writes what the prefix caches of the default model's engines hold, of all tenants."""
        try:
            one = self._models.first
        except ServiceError as error:
            await refuse(context, error)
            raise
        await one.artifacts.subscribe_kv_events(request, context)

    async def get_server_info(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """GetServerInfo: returns version, limits, features, and how each engine that has reported computes. Limits and
        features are those of the default model."""
        try:
            settings = self._models.first.manager.settings
        except ServiceError:
            settings = self._settings
        return control_pb2.GetServerInfoResponse(
            version=settings.version,
            schema_revision=SCHEMA_REVISION,
            gateway_id=settings.gateway_id,
            start_time=self._start_time,
            limits=server_limits(settings),
            features=features(settings.limits, settings.model),
            engines=[engine for one in self._models for engine in one.loads.engines()],
        )

    async def get_load(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.GetLoadResponse:
        """GetLoad: returns the load of this gateway, and that of each engine as last reported."""
        return control_pb2.GetLoadResponse(load=self._load())

    async def watch_load(self, request: control_pb2.WatchLoadRequest, context: Context) -> None:
        """WatchLoad: sends the load every interval until the client ends the call."""
        interval_s = 1.0
        try:
            if request.HasField("interval"):
                interval_s = to_seconds("interval", request.interval, MAX_INTERVAL_S, MIN_INTERVAL_S)
        except ServiceError as error:
            await refuse(context, error)
        while True:
            await context.write(control_pb2.WatchLoadResponse(load=self._load()))
            await asyncio.sleep(interval_s)

    async def drain(self, request: control_pb2.DrainRequest, context: Context) -> None:
        """Drain: begins to drain and reports progress. Draining goes on if the client ends the call."""
        grace_s = self._settings.grace_s
        try:
            if request.HasField("grace"):
                grace_s = to_seconds("grace", request.grace, MAX_GRACE_S, 0.0)
        except ServiceError as error:
            await refuse(context, error)
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="drain")
        while (num_open := self._models.books.admission.num_requests) or not self._draining.done():
            await context.write(control_pb2.DrainResponse(open_requests=num_open))
            await asyncio.wait([self._draining], timeout=DRAIN_INTERVAL_S)
        await context.write(control_pb2.DrainResponse(drained=True))

    def _load(self) -> control_pb2.Load:
        return whole_load(self._models.books, [one.loads for one in self._models])

    async def _known(self, name: str, context: Context) -> Lane:
        """Returns the model of that name; ends the call if there is none."""
        try:
            return self._models.chosen_for(CALLER.get().tenant, name)
        except ServiceError as error:
            await refuse(context, error)
            raise
