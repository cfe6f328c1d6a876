"""The edge's server: what is no HTTP, certificates that change, and those of clients."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette

from sluice_server.services.edge.server import EdgeServer, HttpsFiles, server_of
from tests.services.certificates import Authority
from tests.services.edge.edge_rig import BOUNDS, edge


@contextlib.asynccontextmanager
async def running(https: HttpsFiles) -> AsyncIterator[tuple[EdgeServer, int]]:
    server = server_of(Starlette(), BOUNDS, grace_s=1, https=https)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        task = asyncio.create_task(server.serve(sockets=[opened]))
        yield server, opened.getsockname()[1]
        server.stop()
        await task


async def shown(port: int, trusted: ssl.SSLContext) -> bytes:
    """The certificate that the server shows, after a whole exchange."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        if b" 404 " not in await reader.readline():
            raise ConnectionError("the server gave no answer")
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found
    finally:
        writer.close()


async def test_a_certificate_that_changes_is_shown_to_new_connections(tmp_path: Path) -> None:
    authority = Authority()
    https = HttpsFiles(*authority.issue("localhost").write(tmp_path, "edge"))
    trusted = ssl.create_default_context(cadata=authority.pem.decode())
    async with running(https) as (server, port):
        before = await shown(port, trusted)
        authority.issue("localhost").write(tmp_path, "edge")
        assert await shown(port, trusted) == before
        server.read_certificate(https)
        assert await shown(port, trusted) != before


async def test_clients_without_a_certificate_are_refused_where_one_is_needed(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    https = HttpsFiles(*authority.issue("localhost").write(tmp_path, "edge"), tmp_path / "ca.pem")
    trusted = ssl.create_default_context(cadata=authority.pem.decode())
    async with running(https) as (_, port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(port, trusted)
        trusted.load_cert_chain(*authority.issue("client").write(tmp_path, "client"))
        assert await shown(port, trusted)


CHUNKS = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nnone\r\n"
)


@pytest.mark.parametrize(
    "sent",
    [
        b"no request\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        CHUNKS,
    ],
    ids=["text", "TLS", "a chunk that is none"],
)
async def test_what_is_no_request_is_refused_like_others_and_not_logged(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with edge() as rig:
        caplog.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(rig.url).port)
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400") and b"x-request-id: " in head and b'"error"' in body
        assert (await rig.client.models.list()).data
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
