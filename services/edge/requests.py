"""Reading of HTTP requests: the body, the headers that go on to the gRPC server, and a client that disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from sluice_server.services.edge.errors import EdgeError, bad_request

MAX_BODY_BYTES = 16 << 20  # the gRPC server's limit of one message
PASSED_ON = ("authorization", "traceparent", "tracestate", "x-sluice-priority", "x-sluice-session")
KEY = "x-api-key"  # Anthropic's header of a key; it goes on as authorization
JSON = "application/json"

_T = TypeVar("_T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]


async def until_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Wait for `work`. If the client disconnects first, cancel it and raise ClientDisconnect."""

    async def run() -> _T:
        return await work

    task, gone = asyncio.create_task(run()), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def read_body(request: Request) -> bytes:
    """Returns the body. Raises EdgeError 415 for one that is not declared as plain JSON, which also keeps out what
    other sites' pages may send without being asked for (forms), and 413 for one that is too large, before all of it is
    read."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise _media_type("content-type", kind, JSON)
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise _media_type("content-encoding", coding, "none")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise EdgeError(413, "invalid_request_error", f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _media_type(header: str, found: str, wanted: str) -> EdgeError:
    text = f"{header}: {found[:80]!r} is not supported; send {wanted}"
    return EdgeError(415, "invalid_request_error", text, param=header, code="unsupported_media_type")


def metadata_of(request: Request) -> Metadata:
    """Returns the headers for the gRPC server, unchanged but for x-api-key. Raises EdgeError for a value that is not
    printable ASCII, and for two keys that differ."""
    found = [(name, value) for name in PASSED_ON for value in request.headers.getlist(name)]
    found += _keys(request)
    for name, value in found:
        if not (value.isascii() and value.isprintable()):
            raise bad_request(name, "is not printable ASCII")
    return tuple(found)


def _keys(request: Request) -> list[tuple[str, str]]:
    """Returns the keys of x-api-key as authorization, unless they are there under that name as well."""
    given = request.headers.getlist("authorization")
    keys = [f"Bearer {key}" for key in request.headers.getlist(KEY)]
    if given and any(key not in given for key in keys):
        raise bad_request(KEY, "is another key than that of authorization: send one of them")
    return [] if given else [("authorization", key) for key in keys]
