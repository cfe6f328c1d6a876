"""The handlers of `vllm.grpc.engine.VllmEngine`, on top of the generation service.

Its callers bring no credential, so all calls of one listener are one tenant's (`GatewaySettings.vllm_tenant`).
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from sluice_server.engine.errors import invalid
from sluice_server.engine.executor.computing import UNKNOWN
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.answering import CallEnded, answer
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.calls.vectors import floats
from sluice_server.services.gateway.generation.events import StreamEvent
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.gateway.generation.stream import GenerationStream, RequestReader
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.vllm import described
from sluice_server.services.gateway.vllm.answers import GenerateAnswers
from sluice_server.services.gateway.vllm.contract import common_pb2 as common
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm
from sluice_server.services.gateway.vllm.kv_events import HEARTBEAT_S, KvEventStream
from sluice_server.services.gateway.vllm.running import RunningCalls
from sluice_server.services.gateway.vllm.translate import inputs_of, spec_of
from sluice_server.services.messages.details import Embedded

SERVICE: ServiceDescriptor = vllm.DESCRIPTOR.services_by_name["VllmEngine"]


class VllmEngine:
    """The handlers of the protocol."""

    def __init__(self, service: GenerationService, lane: Lane, clock: Callable[[], float]) -> None:
        """`lane`: of the model that is described; requests of the protocol name none, and are the default model's."""
        self._service = service
        self._manager = lane.manager
        self._loads = lane.loads
        self._artifacts = lane.artifacts
        self._running = RunningCalls()
        self._clock = clock
        self._started_s = clock()

    def table(self) -> Mapping[str, Callable[[Any, Context], Awaitable[Any]]]:
        """Returns the handlers, by method; the server answers UNIMPLEMENTED to all others."""
        return {
            "Generate": self.generate,
            "Embed": self.embed,
            "Abort": self.abort,
            "HealthCheck": self.health_check,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
            "GetTokenizer": self.get_tokenizer,
            "SubscribeKvEvents": self.subscribe_kv_events,
        }

    async def generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Generate: writes chunks and one `complete` per output."""

        async def begin(call: CallMetadata) -> GenerationStream:
            return self._service.generate(call, spec_of(request))

        async def body(stream: GenerationStream) -> None:
            made = GenerateAnswers(request)

            async def write(event: StreamEvent) -> None:
                for response in made.of(event):
                    await context.write(response)

            with self._running.entered(request.request_id, stream.request.request_id):
                await stream.write_all(write)

        try:
            await answer(self._manager.observer, "StreamGenerate", context, begin, body)
        except CallEnded as ended:
            await context.abort(*ended.status)

    async def embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        """Embed: returns the vector of one prompt, pooled and scaled as the model defines."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.embed(call, inputs_of(request))

        async def body(reader: RequestReader) -> vllm.EmbedResponse:
            with self._running.entered(request.request_id, reader.request.request_id):
                value = await reader.outcome()
            assert isinstance(value, Embedded)
            vector = floats(value.vectors[0])
            return vllm.EmbedResponse(embedding=vector, prompt_tokens=value.num_tokens[0], embedding_dim=len(vector))

        try:
            return await answer(self._manager.observer, "Embed", context, begin, body)
        except CallEnded as ended:
            status = ended.status
        await context.abort(*status)
        raise AssertionError("abort raises")

    async def abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Abort: ends generations by the caller's ids. Those that are unknown or have ended are no error."""
        tenant = CALLER.get().tenant
        for request_id in request.request_ids:
            for generation in self._running.of(request_id):
                self._service.cancel(tenant, generation)
        return vllm.AbortResponse()

    async def health_check(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """HealthCheck: whether requests are admitted, as in the health service, and if not, why."""
        refusal = self._manager.refusal
        return vllm.HealthCheckResponse(healthy=refusal is None, message=refusal.message if refusal else "")

    async def get_model_info(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """GetModelInfo: describes the model."""
        return described.model_info(self._manager.settings)

    async def get_server_info(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        """GetServerInfo: describes the server."""
        report = self._loads.any_report
        how = report.computing if report else UNKNOWN
        return described.server_info(self._loads.now(), how, self._clock() - self._started_s)

    async def get_loads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """GetLoads: returns the load of all engines together, as the one rank 0."""
        if request.dp_rank:
            await refuse(context, invalid("dp_rank", f"{request.dp_rank}: this worker has the rank 0 only"))
        return described.loads(self._loads.now(), self._manager.settings.version)

    async def get_tokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """GetTokenizer: writes the tokenizer's files as a zip in chunks, the last one with the digest."""

        async def write(data: bytes, digest: str) -> None:
            await context.write(common.GetTokenizerChunk(data=data, sha256=digest))

        await self._artifacts.write_tokenizer(context, write)

    async def subscribe_kv_events(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """SubscribeKvEvents: writes what the engines' prefix caches hold of the caller's tenant, and the load."""
        await self._artifacts.check_events(context)
        stream = KvEventStream(CALLER.get().tenant, request)
        following = self._artifacts.events.follow(request.start_sequence_number, HEARTBEAT_S)
        async with contextlib.aclosing(following):
            async for batch in following:
                load, now_s = self._loads.now(), time.time()
                made = stream.heartbeat(load, now_s) if batch is None else stream.batch(batch, load, now_s)
                if made is not None:
                    await context.write(made)
