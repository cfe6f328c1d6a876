"""Chat completions and completions over HTTP: whole answers, server-sent events, and cancellation when the client
disconnects."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge import answers
from sluice_server.services.edge.answers import CHAT, COMPLETION, Dialect
from sluice_server.services.edge.errors import bad_request, naming
from sluice_server.services.edge.event_stream import EventStream
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.recovery import repeated
from sluice_server.services.edge.report import AnswerReport, chat_report, completion_report
from sluice_server.services.edge.requests import Metadata, metadata_of, read_body, until_gone
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.resumed import EdgeStream
from sluice_server.services.edge.shared import SharedCalls
from sluice_server.services.edge.stream import Chunks
from sluice_server.services.edge.translate import chat_names, chat_spec, completion_names, completion_specs
from sluice_server.services.edge.wire import ChatRequest, Common, CompletionRequest, decode

NamedSpec: TypeAlias = tuple[types_pb2.GenerationSpec, FieldNames]


class GenerationRoutes:
    """The handlers of the routes that generate."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds since 1970 for the answers."""
        self._channel = channel
        self._calls = SharedCalls(channel)
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._clock = clock

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = decode(await read_body(request), ChatRequest)
        spec = chat_spec(asked)
        return await self._answer(request, CHAT, asked, [(spec, chat_names(asked))], chat_report(asked, spec))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = decode(await read_body(request), CompletionRequest)
        specs = completion_specs(asked)
        named = list(zip(specs, completion_names(asked, len(specs)), strict=True))
        return await self._answer(request, COMPLETION, asked, named, completion_report(asked, specs))

    async def _answer(
        self,
        request: Request,
        dialect: Dialect,
        asked: Common,
        specs: list[NamedSpec],
        report: AnswerReport,
    ) -> Response:
        if asked.stream:
            return await self._stream(request, specs, Chunks(dialect, int(self._clock()), report))
        if asked.stream_options is not None:
            raise bad_request("stream_options", "needs stream to be true")
        return await self._whole(request, dialect, specs, report)

    async def _whole(
        self, request: Request, dialect: Dialect, specs: list[NamedSpec], report: AnswerReport
    ) -> Response:
        metadata = metadata_of(request)

        async def generate() -> list[inference_pb2.GenerateResponse]:
            async with asyncio.TaskGroup() as group:  # a failure cancels the others
                tasks = [group.create_task(self._one(spec, names, metadata)) for spec, names in specs]
            return [task.result() for task in tasks]

        try:
            found = await until_gone(request.receive, generate())
        except ExceptionGroup as group:
            raise _first(group) from None
        return as_json(answers.whole(dialect, found, int(self._clock()), report))

    async def _one(
        self, spec: types_pb2.GenerationSpec, names: FieldNames, metadata: Metadata
    ) -> inference_pb2.GenerateResponse:
        asked = inference_pb2.GenerateRequest(spec=spec)
        with naming(names):
            return await repeated(self._channel, lambda: self._inference.Generate(asked, metadata=metadata))

    async def _stream(self, request: Request, specs: list[NamedSpec], chunks: Chunks) -> Response:
        """Start a stream. Headers are sent once the first event of each prompt has come, so that a refusal still has
        its HTTP status."""
        metadata = metadata_of(request)
        calls = [EdgeStream(self._channel, spec, metadata, self._calls, names) for spec, names in specs]
        try:
            firsts = await until_gone(request.receive, asyncio.gather(*(call.read() for call in calls)))
        except BaseException:
            for call in calls:
                call.cancel()
            raise
        return EventStream(calls, firsts, chunks)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found
