"""The handlers of `inference.GRPCInferenceService`, on top of the generation service."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.answering import CallEnded, answer
from sluice_server.services.gateway.calls.refusal import refuse, tell_refused
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.contract.status import to_status
from sluice_server.services.gateway.generation.events import StreamEvent
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.gateway.generation.stream import GenerationStream
from sluice_server.services.gateway.models.registry import Models, Served
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.gateway.oip.repository import config, index
from sluice_server.services.gateway.oip.responses import InferResponses
from sluice_server.services.gateway.oip.statistics import GenerationCounts
from sluice_server.services.gateway.oip.tensors import Tensor
from sluice_server.services.gateway.oip.translate import INPUTS, OUTPUTS, VERSION, InferRequest, check_version, read
from sluice_server.services.telemetry.observed import Observer

SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
MAX_AT_ONCE = 256  # concurrent requests of one stream; the next one is read when one has ended
Send = Callable[[oip.ModelInferResponse], Awaitable[None]]


class Counted(Served, Protocol):
    """A model whose generations are counted."""

    @property
    def counts(self) -> GenerationCounts:
        """The counts."""


class OpenInference:
    """The handlers of the Open Inference Protocol."""

    def __init__(self, service: GenerationService, models: Models[Counted], observer: Observer, version: str) -> None:
        """`version`: of the server."""
        self._service = service
        self._models = models
        self._observer = observer
        self._version = version

    def table(self) -> Mapping[str, Callable[[Any, Context], Awaitable[Any]]]:
        """Returns the handlers, by method."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "RepositoryIndex": self.repository_index,
            "ModelStatistics": self.model_statistics,
            "ModelInfer": self.model_infer,
            "ModelStreamInfer": self.model_stream_infer,
        }

    async def server_live(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        """ServerLive: true whenever the server can answer."""
        return oip.ServerLiveResponse(live=True)

    async def server_ready(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        """ServerReady: whether requests of the default model are admitted, as in the health service."""
        return oip.ServerReadyResponse(ready=self._is_ready(None))

    async def model_ready(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        """ModelReady: whether requests are admitted; false for an unknown model."""
        return oip.ModelReadyResponse(ready=request.version in ("", VERSION) and self._is_ready(request.name))

    async def server_metadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """ServerMetadata: returns name and version of the server."""
        return oip.ServerMetadataResponse(name="sluice", version=self._version)

    async def model_metadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """ModelMetadata: returns the tensors, those of Triton's vLLM backend."""
        known = await self._known(request.name, request.version, context)
        return oip.ModelMetadataResponse(
            name=known,
            versions=[VERSION],
            platform="sluice",
            inputs=[_described(one) for one in INPUTS.values()],
            outputs=[_described(one) for one in OUTPUTS.values()],
        )

    async def model_config(self, request: oip.ModelConfigRequest, context: Context) -> oip.ModelConfigResponse:
        """ModelConfig: returns what Triton's configuration of such a model would say."""
        return oip.ModelConfigResponse(config=config(await self._known(request.name, request.version, context)))

    async def repository_index(
        self, request: oip.RepositoryIndexRequest, context: Context
    ) -> oip.RepositoryIndexResponse:
        """RepositoryIndex: returns the models, with `ready` those that take requests only."""
        if request.repository_name:
            error = not_found("repository", request.repository_name, "there are none to choose from: leave it out")
            await refuse(context, error)
        tenant = CALLER.get().tenant
        models = [one for one in self._models if self._models.allows(tenant, one)]
        refusals = {one.manager.settings.model.id: one.manager.refusal for one in models}
        reasons = {name: refusal.message if refusal else "" for name, refusal in sorted(refusals.items())}
        return index(reasons, only_ready=request.ready)

    async def model_statistics(
        self, request: oip.ModelStatisticsRequest, context: Context
    ) -> oip.ModelStatisticsResponse:
        """ModelStatistics: returns the counts of this gateway; without a name, those of all models."""
        names = [await self._known(request.name, request.version, context)] if request.name else self._models.ids()
        found = [one for name in sorted(names) if (one := self._models.of(name)) is not None]
        stats = [one.counts.statistics(one.manager.settings.model.id, VERSION) for one in found]
        return oip.ModelStatisticsResponse(model_stats=stats)

    async def model_infer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """ModelInfer: returns one response; a request for a stream is refused."""
        made: list[oip.ModelInferResponse] = []

        async def keep(response: oip.ModelInferResponse) -> None:
            made.append(response)

        try:
            await self._infer(request, context, keep, may_stream=False)
        except CallEnded as ended:
            status = ended.status
        else:
            return made[0]
        await context.abort(*status)
        raise AssertionError("abort raises")

    async def model_stream_infer(self, requests: object, context: Context) -> None:
        """ModelStreamInfer: runs requests concurrently. The error of one request is a message; the stream goes on."""
        places, writing = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Lock()

        async def write(response: oip.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(response)

        async def answer(request: object) -> None:
            try:
                await self._answer(request, context, write)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            while True:
                await places.acquire()
                request = await context.read()
                if request is grpc.aio.EOF:
                    return
                group.create_task(answer(request))

    async def _known(self, name: str, version: str, context: Context) -> str:
        """Returns the id of the model. Ends the call if an unknown one, or another version, is named."""
        try:
            check_version(name, version)
            return self._models.chosen_for(CALLER.get().tenant, name).manager.settings.model.id
        except ServiceError as error:
            await refuse(context, error)
            raise

    def _is_ready(self, name: str | None) -> bool:
        try:
            return self._models.choose(name).manager.refusal is None
        except ServiceError:
            return False

    async def _answer(
        self, request: object, context: Context, write: Callable[[oip.ModelStreamInferResponse], Awaitable[None]]
    ) -> None:
        async def send(response: oip.ModelInferResponse) -> None:
            await write(oip.ModelStreamInferResponse(infer_response=response))

        known = request if isinstance(request, oip.ModelInferRequest) else None
        try:
            await self._infer(known, context, send, may_stream=True)
        except CallEnded as ended:
            code, message, _ = ended.status
            response = oip.ModelInferResponse(id=known.id if known is not None else "")
            text = f"{code.name}: {message}"
            await write(oip.ModelStreamInferResponse(error_message=text, infer_response=response))
        except grpc.aio.InternalError:
            return  # the connection is gone, and grpc cancels the call

    async def _infer(
        self, request: "oip.ModelInferRequest | None", context: Context, send: Send, *, may_stream: bool
    ) -> None:
        """Runs one request and sends its responses. Raises CallEnded."""
        observer = self._observer
        try:
            asked = _read(request, may_stream=may_stream)
        except ServiceError as error:
            trailers = tell_refused(observer, f"{SERVICE.full_name}/ModelInfer", context, error)
            code, message, details = to_status(error)
            raise CallEnded((code, message, (*trailers, *details))) from None
        made = InferResponses(asked)

        async def begin(call: CallMetadata) -> GenerationStream:
            return self._service.generate(call, asked.spec)

        async def body(stream: GenerationStream) -> None:
            async def write(event: StreamEvent) -> None:
                for response in made.of(event):
                    await send(response)

            await stream.write_all(write)

        await answer(observer, "StreamGenerate", context, begin, body)


def _read(request: oip.ModelInferRequest | None, *, may_stream: bool) -> InferRequest:
    if request is None:
        raise invalid("request", "is not a valid ModelInferRequest")
    asked = read(request)
    if asked.streams and not may_stream:
        raise invalid("stream", "is for ModelStreamInfer: ModelInfer has one response")
    return asked


def _described(tensor: Tensor) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=[1])
