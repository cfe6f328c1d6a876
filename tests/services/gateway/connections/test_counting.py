import asyncio

import grpc

from sluice_server.services.gateway.connections.counting import BUSY_BYTES, Counter
from sluice_server.services.gateway.connections.resets import Counts
from tests.services.gateway.fake_ring import running
from tests.services.gateway.raw_http2 import PING, PREFACE, SETTINGS, frame

PONG = frame(PING, 1, 0, b"12345678")


async def test_connections_that_received_something_are_counted_with_their_peers() -> None:
    async with running() as rig:
        await rig.channel.channel_ready()
        counter = Counter()
        quiet = counter.counts(rig.port)
        failed: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = rig.channel.unary_unary("/none/None")
        assert await failed(b"x" * BUSY_BYTES).code() is grpc.StatusCode.UNIMPLEMENTED
        busy = counter.counts(rig.port)
        assert not quiet.busy
        assert [one.host for one in busy.busy] == ["127.0.0.1"] and busy.busy[0].port
        assert busy.busy[0].number in busy.numbers
        again = counter.counts(rig.port)
        assert not again.busy and again.numbers == busy.numbers  # nothing since


async def test_a_connection_that_came_later_is_found() -> None:
    async with running() as rig:
        await rig.channel.channel_ready()
        counter = Counter()
        counter.counts(rig.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678") * BUSY_BYTES)
        async with asyncio.timeout(20):
            await reader.readuntil(PONG)  # core has seen it
        assert writer.get_extra_info("sockname")[:2] in [one.peer for one in counter.counts(rig.port).busy]
        writer.transport.abort()


async def test_a_server_that_has_gone_has_no_connections() -> None:
    async with running() as rig:
        await rig.channel.channel_ready()
        counter, port = Counter(), rig.port
        failed: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = rig.channel.unary_unary("/none/None")
        assert await failed(b"x" * BUSY_BYTES).code() is grpc.StatusCode.UNIMPLEMENTED
        assert counter.counts(port).numbers
    assert counter.counts(port) == Counts([], frozenset())
