import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from sluice_server.services.edge.connections import Bounds, Connections, group_of
from tests.services.edge.edge_rig import BOUNDS, EdgeRig, edge


class Held:
    """A connection as the connection limiter sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cut = False

    def close(self) -> None:
        self.cut = True


def test_an_address_is_bounded_by_cutting_its_own_oldest_idle_connection() -> None:
    held = Connections(Bounds(most=8, most_of_address=2))
    first, second, third, other = Held("first"), Held("second"), Held("third"), Held("other")
    assert held.opened(other, "b") and held.opened(first, "a") and held.opened(second, "a")
    held.works(first)
    assert held.opened(third, "a")
    assert [one.name for one in (first, second, third, other) if one.cut] == ["second"]
    held.rests(first)  # younger than the third's rest
    assert held.opened(Held("fourth"), "a") and third.cut and not first.cut


def test_a_full_server_cuts_the_oldest_idle_connection_of_the_address_that_has_most() -> None:
    held = Connections(Bounds(most=3, most_of_address=3))
    mine, theirs = Held("mine"), [Held("1"), Held("2")]
    assert held.opened(mine, "a") and all(held.opened(one, "b") for one in theirs)
    assert held.opened(Held("new"), "c")
    assert (mine.cut, theirs[0].cut, theirs[1].cut) == (False, True, False)


def test_no_connection_that_works_is_cut() -> None:
    held = Connections(Bounds(most=2, most_of_address=2))
    busy = [Held("1"), Held("2")]
    for one in busy:
        assert held.opened(one, "a")
        held.works(one)
    assert not held.opened(Held("3"), "a") and not held.opened(Held("4"), "b")
    assert not any(one.cut for one in busy)
    held.closed(busy[0])
    held.closed(busy[0])  # once is enough
    assert held.opened(Held("5"), "b") and len(held) == 2


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_host_is_an_address_of_v4_or_a_network_of_v6(address: str, group: str) -> None:
    assert group_of(address) == group


async def opened(rig: EdgeRig, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


@contextlib.asynccontextmanager
async def idle(rig: EdgeRig, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Opens that many connections that have sent one byte each."""
    made = [await opened(rig, b"G") for _ in range(number)]
    try:
        yield [reader for reader, _ in made]
    finally:
        for _, writer in made:
            writer.close()


async def test_idle_connections_of_one_byte_keep_no_client_out() -> None:
    async with edge(bounds=Bounds(most=8, most_of_address=8)) as rig, idle(rig, 20):
        assert (await rig.client.models.list()).data[0].id == "toy"


@pytest.mark.parametrize(
    ("sent", "bounds"),
    [
        (b"", replace(BOUNDS, head_s=0.05)),
        (b"GET /healthz HTTP/1.1\r\nhost:", replace(BOUNDS, head_s=0.05)),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
            replace(BOUNDS, body_s=0.05),
        ),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\nGET", replace(BOUNDS, head_s=0.05)),
    ],
    ids=["nothing", "half a head", "half a body", "half of a second head"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes, bounds: Bounds) -> None:
    async with edge(bounds=bounds) as rig:
        reader, writer = await opened(rig, sent)
        await asyncio.wait_for(reader.read(), 30)  # until it is closed
        writer.close()
        assert (await rig.client.models.list()).data[0].id == "toy"


async def test_a_reader_that_stops_loses_its_connection() -> None:
    async with edge(bounds=replace(BOUNDS, write_s=0.05)) as rig:
        at = urlsplit(rig.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, (at.hostname, at.port))
            # Many answers are asked for and none is read: the server's buffers fill.
            asking = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2000
            with pytest.raises(OSError):
                while True:
                    await asyncio.wait_for(loop.sock_sendall(slow, asking), 30)
        assert (await rig.client.models.list()).data[0].id == "toy"
