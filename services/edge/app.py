"""The HTTP application: routes, request bodies, server-sent events, and cancellation when the client disconnects.

A client of one gRPC channel. Credentials and trace context of each request are passed on unchanged. Stateless.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from sluice_server.services.edge import answers
from sluice_server.services.edge.answers import CHAT, COMPLETION, Dialect, Json
from sluice_server.services.edge.errors import EdgeError, bad_request, from_rpc, unsupported
from sluice_server.services.edge.stream import Chunks
from sluice_server.services.edge.translate import chat_spec, completion_specs
from sluice_server.services.edge.wire import ChatRequest, Common, CompletionRequest, decode

MAX_BODY_BYTES = 16 << 20  # the gRPC server's limit of one message
HEALTH_TIMEOUT_S = 2.0
PASSED_ON = ("authorization", "traceparent", "tracestate", "x-sluice-priority")

GONE = EdgeError(499, "cancelled", "the client closed its connection before it was answered")
BROKEN = EdgeError(500, "server_error", "the edge failed at this request; its log has the reason")

# Script and style are inline and nothing else is loaded. Other sites cannot frame the page or read its key.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_PAGE = resources.files("sluice_server.services.edge").joinpath("page.html").read_text("utf-8")

_T = TypeVar("_T")
Metadata = tuple[tuple[str, str], ...]


def build(channel: grpc.aio.Channel, clock: Callable[[], float] = time.time) -> Starlette:
    """Returns the application in front of `channel`; `clock` gives the seconds since 1970 for the answers."""
    edge = Edge(channel, clock)
    routes = [
        Route("/v1/chat/completions", edge.chat, methods=["POST"]),
        Route("/v1/completions", edge.completions, methods=["POST"]),
        Route("/v1/models", edge.models),
        Route("/v1/models/{model:path}", edge.model),
        Route("/healthz", edge.health),
        Route("/", page),
    ]
    handlers: dict[Any, Callable[[Request, Any], Response]] = {
        EdgeError: lambda request, error: refusal(error),
        grpc.aio.AioRpcError: lambda request, error: refusal(from_rpc(error)),
        HTTPException: lambda request, error: refusal(unroutable(request, error)),
        ClientDisconnect: lambda request, error: refusal(GONE),  # for statistics only: its client is gone
        Exception: lambda request, error: refusal(BROKEN),
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class Edge:
    """The handlers of the routes."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._control: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._clock = clock

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = decode(await read_body(request), ChatRequest)
        return await self._answer(request, CHAT, asked, [chat_spec(asked)], bool(asked.logprobs))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = decode(await read_body(request), CompletionRequest)
        return await self._answer(request, COMPLETION, asked, completion_specs(asked), asked.logprobs is not None)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        found = await self._control.ListModels(control_pb2.ListModelsRequest(), metadata=metadata_of(request))
        return as_json({"object": "list", "data": [answers.model(one) for one in found.models]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        wanted = control_pb2.GetModelRequest(model=request.path_params["model"])
        return as_json(answers.model((await self._control.GetModel(wanted, metadata=metadata_of(request))).model))

    async def health(self, request: Request) -> Response:
        """GET /healthz: whether the service behind this server admits requests."""
        name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
        try:
            check = health_pb2.HealthCheckRequest(service=name)
            found = await self._health.Check(check, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return as_json({"status": error.code().name}, 503)
        serving = found.status == health_pb2.HealthCheckResponse.SERVING
        return as_json({"status": "SERVING" if serving else "NOT_SERVING"}, 200 if serving else 503)

    async def _answer(
        self, request: Request, dialect: Dialect, asked: Common, specs: list[types_pb2.GenerationSpec], scored: bool
    ) -> Response:
        if not asked.stream:
            if asked.stream_options is not None:
                raise bad_request("stream_options", "needs stream to be true")
            return await self._whole(request, dialect, specs, scored)
        if len(specs) > 1:
            raise unsupported("prompt", "several prompts cannot be streamed together: send one, or stream false")
        include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = Chunks(dialect, int(self._clock()), scored, include_usage)
        return await self._stream(request, specs[0], chunks)

    async def _whole(
        self, request: Request, dialect: Dialect, specs: list[types_pb2.GenerationSpec], scored: bool
    ) -> Response:
        metadata = metadata_of(request)

        async def generate() -> list[inference_pb2.GenerateResponse]:
            async with asyncio.TaskGroup() as group:  # a failure cancels the others
                tasks = [group.create_task(self._one(spec, metadata)) for spec in specs]
            return [task.result() for task in tasks]

        try:
            found = await until_gone(request, generate())
        except ExceptionGroup as group:
            raise _first(group) from None
        return as_json(answers.whole(dialect, found, int(self._clock()), scored))

    async def _one(self, spec: types_pb2.GenerationSpec, metadata: Metadata) -> inference_pb2.GenerateResponse:
        return await self._inference.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata)

    async def _stream(self, request: Request, spec: types_pb2.GenerationSpec, chunks: Chunks) -> Response:
        """Start a stream. Headers are sent once the first event has come, so that a refusal still has its HTTP
        status."""
        wanted = inference_pb2.StreamGenerateRequest(spec=spec)
        call = self._inference.StreamGenerate(wanted, metadata=metadata_of(request))
        try:
            first = await until_gone(request, call.read())
        except BaseException:
            call.cancel()
            raise
        if first is grpc.aio.EOF:
            raise EdgeError(500, "server_error", "the server ended the stream without an event")
        assert isinstance(first, inference_pb2.StreamGenerateResponse)
        return StreamingResponse(_events(call, first, chunks), media_type="text/event-stream")


async def _events(
    call: "grpc.aio.UnaryStreamCall[inference_pb2.StreamGenerateRequest, inference_pb2.StreamGenerateResponse]",
    first: inference_pb2.StreamGenerateResponse,
    chunks: Chunks,
) -> AsyncIterator[bytes]:
    """Yields server-sent events; an error is sent as the last event. Cancels the generation if the client stops
    reading."""

    async def all_events() -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        event: object = first
        while isinstance(event, inference_pb2.StreamGenerateResponse):  # else EOF
            yield event
            event = await call.read()

    try:
        async with contextlib.aclosing(chunks.of(all_events())) as made:
            async for chunk in made:
                yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except grpc.aio.AioRpcError as error:
        yield _event(from_rpc(error).body())
    finally:
        call.cancel()  # no effect on a call that has ended


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def until_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Wait for `work`. If the client disconnects first, cancel it and raise ClientDisconnect."""

    async def run() -> _T:
        return await work

    task, gone = asyncio.create_task(run()), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def read_body(request: Request) -> bytes:
    """Returns the body. Raises EdgeError 413 for a body that is too large, before all of it is read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise EdgeError(413, "invalid_request_error", f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def metadata_of(request: Request) -> Metadata:
    """Returns the headers for the gRPC server, unchanged. Raises EdgeError for a value that is not printable ASCII."""
    found = [(name, value) for name in PASSED_ON for value in request.headers.getlist(name)]
    for name, value in found:
        if not (value.isascii() and value.isprintable()):
            raise bad_request(name, "is not printable ASCII")
    return tuple(found)


def unroutable(request: Request, error: HTTPException) -> EdgeError:
    """Returns the error for an unknown path or method."""
    text = f"{request.method} {request.url.path}: {error.detail}"
    return EdgeError(error.status_code, "invalid_request_error", text, code="unknown_url")


def as_json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refusal(error: EdgeError) -> Response:
    """Returns an error response in OpenAI's format."""
    return as_json(error.body(), error.status, error.headers())


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found


async def page(request: Request) -> HTMLResponse:
    """GET /: the web page, a single file that calls the HTTP API of its own origin."""
    return HTMLResponse(_PAGE, headers=PAGE_HEADERS)
