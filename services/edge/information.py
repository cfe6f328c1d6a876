"""A server described over HTTP: models, health, version, load, metrics."""

import grpc
from prometheus_client import CONTENT_TYPE_LATEST
from sluice.v1 import control_pb2, control_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge import answers
from sluice_server.services.edge.health import ADMITS, LIVES, SERVING, ServiceHealth
from sluice_server.services.edge.observed import HttpObserver
from sluice_server.services.edge.requests import metadata_of
from sluice_server.services.edge.responses import as_json
from sluice_server.version import VERSION


class Information:
    """The handlers of the routes that describe the server."""

    def __init__(self, channel: grpc.aio.Channel, observer: HttpObserver) -> None:
        self._control: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)
        self._health = ServiceHealth(channel)
        self._observer = observer

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        found = await self._control.ListModels(control_pb2.ListModelsRequest(), metadata=metadata_of(request))
        adapters = [answers.adapter(name, one) for one in found.models for name in one.adapters]
        named = {each.alias: one for one in found.models for each in one.aliases}
        aliases = [answers.alias(name, one) for name, one in named.items()]
        return as_json({"object": "list", "data": [*(answers.model(one) for one in found.models), *aliases, *adapters]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name, metadata = request.path_params["model"], metadata_of(request)
        wanted = control_pb2.GetModelRequest(model=name)
        try:
            return as_json(answers.model((await self._control.GetModel(wanted, metadata=metadata)).model))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            found = await self._control.ListModels(control_pb2.ListModelsRequest(), metadata=metadata)
            base = next((one for one in found.models if name in one.adapters), None)
            if base is None:
                raise
            return as_json(answers.adapter(name, base))

    async def health(self, request: Request) -> Response:
        """GET /health: whether the service behind this server answers and is not being drained."""
        return await self._status(LIVES)

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: whether it admits requests."""
        return await self._status(ADMITS)

    async def ping(self, request: Request) -> Response:
        """GET /ping: as /health."""
        return await self._status(LIVES)

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: as /health/ready."""
        return await self._status(ADMITS)

    async def version(self, request: Request) -> Response:
        """GET /version: of this server."""
        return as_json({"version": VERSION})

    async def load(self, request: Request) -> Response:
        """GET /load: the open requests of the gateway, and those of the engines behind it."""
        found = (await self._control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata_of(request))).load
        return as_json(
            {
                "server_load": found.open_requests,
                "max_server_load": found.max_open_requests,
                "running": sum(one.running_requests for one in found.engines),
                "waiting": sum(one.waiting_requests for one in found.engines),
            }
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: of this process, in Prometheus's format."""
        return Response(self._observer.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _status(self, service: str) -> Response:
        status = await self._health.status(service)
        return as_json({"status": status}, 200 if status == SERVING else 503)
