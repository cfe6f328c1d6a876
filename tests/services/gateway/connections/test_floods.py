"""A client that opens calls only to reset them loses its connection, and no other does."""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Iterable

import grpc
import pytest

from services.gateway.connections import connections
from services.gateway.connections.floods import ALARM, FloodGuard, floods
from services.gateway.connections.resets import ConnectionCalls
from services.telemetry.observed import Unobserved
from tests.services.gateway.fake_ring import generation, running, settings, stream_request, unary_request
from tests.services.gateway.raw_http2 import PREFACE, RST_STREAM, SETTINGS, frame, headers

CANCEL = struct.pack(">I", 8)


class Door:
    """Connections as they are told."""

    def __init__(self) -> None:
        self.failed = 0
        self.all: list[ConnectionCalls] = []
        self.num_counted = 0
        self.listed: list[tuple[str, int]] = []
        self.was_cut: list[tuple[str, int]] = []

    def num_failed(self) -> int:
        return self.failed

    def counts(self) -> list[ConnectionCalls]:
        self.num_counted += 1
        return self.all

    def peers(self, port: int) -> list[tuple[str, int]]:
        return self.listed

    def cut(self, peers: Iterable[tuple[str, int]]) -> int:
        self.was_cut += peers
        self.all = [one for one in self.all if (one.host, one.port) not in self.was_cut]
        return len(self.was_cut)


async def beat(some: FloodGuard) -> None:
    some.beat(50051)
    if some._looking is not None:
        await some._looking


async def test_connections_are_counted_only_while_many_calls_fail(caplog: pytest.LogCaptureFixture) -> None:
    door, cuts = Door(), []
    some = floods(1000, 10, lambda: 0.0, lambda: cuts.append(1), door)
    door.failed = ALARM - 1
    await beat(some)
    assert door.num_counted == 0
    door.failed += 2000
    door.all = [ConnectionCalls(1, "10.0.0.1", 7, 1001), ConnectionCalls(2, "10.0.0.2", 8, 1000)]
    await beat(some)
    assert door.num_counted == 2 and door.was_cut == [("10.0.0.1", 7)] and len(cuts) == 1
    door.failed += 2000
    door.all = [ConnectionCalls(3, "10.0.0.1", 9, 1001)]
    await beat(some)
    assert len(cuts) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "connections were cut that reset their calls as they began, or were too many: 1 of 10.0.0.1"
    ]  # a flood of them is no flood of lines
    await some.close()


async def test_one_address_has_no_more_connections_than_its_share_and_the_last_to_come_go() -> None:
    door, cuts = Door(), []
    some = floods(1000, 2, lambda: 0.0, lambda: cuts.append(1), door)
    door.listed = [("10.0.0.1", 3), ("10.0.0.1", 2), ("10.0.0.2", 1)]
    await beat(some)
    assert not cuts
    door.listed = [("10.0.0.1", 1), *door.listed, ("10.0.0.1", 4)]
    some._list_s = 0.0
    await beat(some)
    assert sorted(door.was_cut) == [("10.0.0.1", 1), ("10.0.0.1", 4)]
    await some.close()


async def test_connections_beyond_the_limits_are_closed_and_room_is_made_when_some_leave() -> None:
    async with running(settings(max_connections=8, max_connections_per_address=6)) as rig:
        await rig.channel.channel_ready()

        async def is_let_in() -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            held.append(writer)
            with contextlib.suppress(ConnectionError):
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
                return bool(await reader.read(1))
            return False

        held: list[asyncio.StreamWriter] = []
        let_in = [await is_let_in() for _ in range(20)]
        assert let_in[:5] == [True] * 5 and False in let_in
        async with asyncio.timeout(20):
            while len(connections.peers(rig.port)) > 6:  # the address has more than its share
                await asyncio.sleep(0.01)
            for writer in held:
                writer.close()
            while not await is_let_in():
                await asyncio.sleep(0.01)
        for writer in held:
            writer.close()
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"


async def test_rapid_reset_ends_its_own_connection() -> None:
    counted: list[str] = []

    class Counting(Unobserved):
        def count(self, name: str, **labels: str) -> None:
            counted.append(name)

    async with running(settings(max_concurrent_streams=256), observer=Counting()) as rig:
        rig.ring.script = lambda submit: None
        neighbour = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                for first in itertools.count(1, 8 * ALARM):  # far more between two beats than it takes
                    if reader.at_eof():
                        break
                    numbers = range(first, first + 8 * ALARM, 2)
                    opened = [headers(one, "Embed") + frame(RST_STREAM, 0, one, CANCEL) for one in numbers]
                    writer.write(b"".join(opened))
                    await writer.drain()
                    await rig.ring.until(rig.ring.changed.is_set)  # a beat of the gateway
                    rig.ring.changed.clear()
        writer.transport.abort()
        async with asyncio.timeout(20):
            while "connection_cut" not in counted:  # its peer may know it first
                await asyncio.sleep(0.001)
        rig.ring.play(*generation(submit, ["a"]))
        assert [event.WhichOneof("event") async for event in neighbour][-1] == "finished"
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
async def test_a_connection_is_found_by_its_peer_and_cut(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = host == "::"  # a client of IPv4 is then told as ::ffff:127.0.0.1
    to = "127.0.0.1" if dual else host
    with (
        socket.create_server((host, 0), family=family, dualstack_ipv6=dual) as listening,
        socket.create_connection((to, listening.getsockname()[1])) as client,
        listening.accept()[0],
    ):
        client.sendall(b"x" * 1000)
        peer = client.getsockname()[:2]
        assert connections.cut([(to, 1)]) == 0
        assert connections.cut([peer]) == 1  # the server's end, and not the client's, which is also of this process
        client.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            assert client.recv(10) == b""


async def test_every_connection_is_counted_with_its_peer() -> None:
    async with running() as rig:
        await rig.channel.channel_ready()
        failed: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = rig.channel.unary_unary("/none/None")
        assert await failed(b"").code() is grpc.StatusCode.UNIMPLEMENTED
        found = connections.counts()
        assert {one.host for one in found} == {"127.0.0.1"} and all(one.port for one in found)
