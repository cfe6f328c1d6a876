"""One HTTP connection of the edge: what is refused, in which pieces requests may come, and what follows them."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from sluice_server.services.edge.connections import Bounds
from sluice_server.services.edge.server import server_of
from tests.services.edge.edge_rig import BOUNDS

LENGTH = b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = b"POST /chunks HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n"
CHUNKS += b"3;a=b\r\nh\r\n\r\n4\r\n\r\n\r\n\r\n0\r\nhost: y\r\n\r\n"
GET = b"GET /get?q=1 HTTP/1.1\r\nhost: x\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n" + b"GET /" * 10
BEGUN = b"HTTP/1.1 "
HEAD_BYTES = 1000


@dataclasses.dataclass
class Echo:
    """Answers with method, path, headers' names and body; at /early before it has read the body."""

    paths: list[str] = dataclasses.field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    hold: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        body, more = b"", scope["path"] != "/early"
        if scope["path"] == "/held":
            await self.hold.wait()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.at_once -= 1
                return
            body += message["body"]
            more = message["more_body"]
        names = b" ".join(sorted(name for name, _ in scope["headers"]))
        said = b"%s %s [%s] %r\n" % (scope["method"].encode(), scope["path"].encode(), names, body)
        head: Message = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-length", b"%d" % len(said))]})
        self.at_once -= 1
        await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def serving(bounds: Bounds = BOUNDS) -> AsyncIterator[tuple[int, Echo]]:
    app = Echo()
    server = server_of(app, bounds, grace_s=1)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        task = asyncio.create_task(server.serve(sockets=[opened]))
        yield opened.getsockname()[1], app
        server.stop()
        await task


async def ask(port: int, *parts: bytes, ends: int = 1) -> bytes:
    """Sends each part for itself; returns what comes up to that many answers, or up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened: socket.socket = writer.get_extra_info("socket")
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while found.count(b"]") < ends and (more := await reader.read(1 << 16)):
                found += more
    except ConnectionError:
        pass
    finally:
        writer.close()
    return found


TWO_WAYS = {
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n",
    "two equal lengths": b"content-length: 5\r\ncontent-length: 5\r\n",
    "a list of lengths": b"content-length: 5, 5\r\n",
    "a length with a sign": b"content-length: +5\r\n",
    "a negative length": b"content-length: -5\r\n",
    "a length of letters": b"content-length: 0x5\r\n",
    "a length that overflows": b"content-length: 18446744073709551621\r\n",
    "two codings": b"transfer-encoding: gzip, chunked\r\n",
    "chunks that are not last": b"transfer-encoding: chunked, identity\r\n",
    "chunks twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "another coding": b"transfer-encoding: gzip\r\n",
    "a coding with a character": b"transfer-encoding: \x0bchunked\r\n",
    "two hosts": b"host: y\r\n",
    "a blank before the colon": b"content-length : 5\r\n",
    "a folded line": b"a: b\r\n content-length: 5\r\n",
    "a line without colon": b"content-length\r\n",
    "an empty name": b": 5\r\n",
    "a zero byte": b"a: b\x00c\r\n",
    "a line end within a value": b"a: b\rcontent-length: 5\r\n",
    "a line end alone": b"a: b\ncontent-length: 5\r\n",
}


@pytest.mark.parametrize("lines", TWO_WAYS.values(), ids=TWO_WAYS)
async def test_a_head_that_two_readers_could_read_in_two_ways_is_refused(lines: bytes) -> None:
    async with serving() as (port, app):
        found = await ask(
            port, b"POST /length HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\nhelloGET /hidden HTTP/1.1\r\n\r\n"
        )
        assert found[:12] in (BEGUN + b"400", BEGUN + b"501") and found.count(BEGUN) == 1
        assert b"connection: close" in found and b"x-request-id: " in found and b'"error"' in found
        assert "/hidden" not in app.paths


FIRST_LINES = {
    "no request": b"no request",
    "HTTP/2": b"PRI * HTTP/2.0",
    "a later version": b"GET / HTTP/2.0",
    "an early version": b"GET / HTTP/0.9",
    "a version with blanks": b"GET / HTTP/1 .1",
    "no version": b"GET /",
    "a tunnel": b"CONNECT x:80 HTTP/1.1",
    "no host in the target": b"GET http://[ HTTP/1.1",
    "bytes in the path": b"GET /\xff HTTP/1.1",
}


@pytest.mark.parametrize("line", FIRST_LINES.values(), ids=FIRST_LINES)
async def test_a_first_line_that_is_none_is_refused(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (port, app):
        found = await ask(port, line + b"\r\nhost: x\r\n\r\n")
        assert found[:12] in (BEGUN + b"400", BEGUN + b"505") and b'"error"' in found
    assert not app.paths and not caplog.records


async def test_a_request_of_http_1_1_needs_a_host() -> None:
    async with serving() as (port, _):
        assert (await ask(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(BEGUN + b"400")
        assert (await ask(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(BEGUN + b"200")


BOMBS = {
    "a long line": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 10 * HEAD_BYTES + b"\r\n\r\n",
    "a line without end": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 10 * HEAD_BYTES,
    "many lines": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * HEAD_BYTES + b"\r\n",
    "a long path": b"GET /" + b"a" * 10 * HEAD_BYTES,
    "line ends": b"\r\n" * 10 * HEAD_BYTES,
    "a long trailer": CHUNKS[: CHUNKS.rindex(b"y")] + b"y" * 10 * HEAD_BYTES,
    "many trailers": CHUNKS[: CHUNKS.rindex(b"host")] + b"a:\r\n" * 10 * HEAD_BYTES,
    "a long extension of a chunk": CHUNKS[: CHUNKS.index(b"=b")] + b"=" * 10 * HEAD_BYTES,
}


@pytest.mark.parametrize("size", [100, 1 << 20])
@pytest.mark.parametrize("sent", BOMBS.values(), ids=BOMBS)
async def test_what_stands_round_bodies_is_bounded(sent: bytes, size: int) -> None:
    async with serving(dataclasses.replace(BOUNDS, head_bytes=HEAD_BYTES)) as (port, _):
        found = await ask(port, *[sent[at : at + size] for at in range(0, len(sent), size)])
        assert found[:12] in (b"", BEGUN + b"431", BEGUN + b"400")  # b"": cut while it was still sending
        assert (await ask(port, GET)).startswith(BEGUN + b"200")


SAID = (
    b"POST /length [content-length host] b'hello'\n"
    b"POST /chunks [host transfer-encoding] b'h\\r\\n\\r\\n\\r\\n'\n"
    b"GET /get [host] b''\n"
    b"POST /early [content-length host] b''\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 1000])
async def test_requests_are_answered_in_order_in_whatever_pieces_they_come(size: int) -> None:
    async with serving() as (port, app):
        sent = b"\r\n" + 2 * (LENGTH + CHUNKS + GET + EARLY)
        found = await ask(port, *[sent[at : at + size] for at in range(0, len(sent), size)], ends=8)
        bodies = b"".join(one.split(b"\r\n\r\n")[1] for one in found.split(BEGUN)[1:])
        assert bodies == 2 * SAID and app.most_at_once == 1


async def test_requests_that_come_ahead_wait_unparsed() -> None:
    async with serving() as (port, app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + GET * 1000 + b"no request\r\n\r\n")
        while not app.paths:
            await asyncio.sleep(0)
        assert (await ask(port, GET)).startswith(BEGUN + b"200")  # of another connection
        assert app.paths == ["/held", "/get"]
        app.hold.set()
        found = await reader.read()
        writer.close()
        assert found.count(BEGUN + b"200") == 1001 and found.count(BEGUN + b"400") == 1


async def test_what_follows_a_request_to_close_is_not_answered() -> None:
    async with serving() as (port, app):
        found = await ask(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + GET, ends=2)
        assert found.count(BEGUN) == 1 and app.paths == ["/"]


async def test_a_body_is_asked_for_where_the_client_waits_to_be_asked() -> None:
    async with serving() as (port, _):
        head, _, body = LENGTH.partition(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == BEGUN + b"100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(BEGUN + b"200")
        writer.close()


@pytest.mark.parametrize("request_", [LENGTH, GET, CHUNKS], ids=["a length", "no body", "chunks"])
async def test_an_offer_of_another_protocol_is_not_taken(request_: bytes) -> None:
    """Java's HTTP client and curl --http2 offer HTTP/2 with their first request, also with a body."""
    offer = b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n"
    async with serving() as (port, app):
        found = await ask(port, request_.replace(b"\r\n\r\n", offer, 1), GET, ends=2)
        assert found.count(BEGUN + b"200") == 2 and b"GET /get [host]" in found
        assert (b"b'hello'" in found) is (request_ is LENGTH) and len(app.paths) == 2


async def test_a_broken_body_ends_its_request() -> None:
    async with serving() as (port, app):
        found = await ask(port, CHUNKS[: CHUNKS.index(b"3;")], b"none\r\n")
        assert found.startswith(BEGUN + b"400") and found.count(BEGUN) == 1
        while app.at_once:
            await asyncio.sleep(0)
