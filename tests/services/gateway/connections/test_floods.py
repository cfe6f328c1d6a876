"""A client that opens calls only to reset them loses its connection, and no other does."""

import asyncio
import contextlib
import itertools
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import grpc
import pytest
from sluice.v1 import inference_pb2_grpc

from sluice_server.services.gateway.connections import connections
from sluice_server.services.gateway.connections.address_limiter import Peer
from sluice_server.services.gateway.connections.floods import ALARM, HOLD_S, LIST_EVERY_S, FloodGuard, floods
from sluice_server.services.gateway.connections.resets import ConnectionCalls, Counts
from sluice_server.services.gateway.connections.screen import Held
from sluice_server.services.gateway.connections.threads import TURN_S, USUAL_S
from sluice_server.services.telemetry.observed import Unobserved
from tests.services.gateway.fake_ring import generation, running, settings, stream_request, unary_request
from tests.services.gateway.raw_http2 import PREFACE, RST_STREAM, SETTINGS, frame, headers

CANCEL = struct.pack(">I", 8)


class Door:
    """The connections as reported by grpc's core and by the system."""

    def __init__(self) -> None:
        self.all: list[ConnectionCalls] = []
        self.num_counted = 0
        self.turns_s: set[float] = set()
        self.listed: list[Peer] = []
        self.was_cut: list[Peer] = []
        self.held: list[Held] = []
        self.is_holding = False
        self.num_released = 0

    def counts(self, port: int) -> Counts:
        self.num_counted += 1
        self.turns_s.add(round(sys.getswitchinterval(), 4))
        return Counts(self.all, frozenset(one.number for one in self.all))

    def peers(self, port: int) -> list[Peer]:
        return self.listed

    def cut(self, peers: Iterable[Peer]) -> int:
        self.was_cut += peers
        self.all = [one for one in self.all if one.peer not in self.was_cut]
        return len(self.was_cut)

    def hold(self, port: int) -> None:
        self.is_holding = True

    def screen(self, port: int, judge: Callable[[Sequence[Held]], tuple[Sequence[Peer], Sequence[Peer]]]) -> list[Peer]:
        self.turns_s.add(round(sys.getswitchinterval(), 4))
        go, over = judge(self.held)
        self.held = [one for one in self.held if one.peer not in (*go, *over)]
        return list(over)

    def release(self, port: int) -> None:
        self.is_holding = False
        self.num_released += 1


class Clock:
    """A clock that advances whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def settled(some: FloodGuard) -> None:
    for task in (some._listing, some._watching):
        if task is not None:
            await task


def give_up(some: FloodGuard, num: int) -> None:
    for _ in range(num):
        some.given_up()


async def test_connections_are_counted_only_when_many_calls_are_given_up() -> None:
    door = Door()
    some = floods(1000, 10, lambda: 0.0, lambda: None, door, door)
    give_up(some, ALARM - 1)
    some.beat(50051)
    give_up(some, ALARM - 1)  # since the beat
    await settled(some)
    assert door.num_counted == 0
    door.all = [ConnectionCalls(1, "10.0.0.1", 7, 1000)]
    some.given_up()
    await settled(some)
    assert door.num_counted == 1 and not door.was_cut and not door.is_holding
    await some.close()


async def test_after_a_cut_new_connections_are_held_and_looked_at_until_there_is_no_more_to_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door, clock, cuts = Door(), Clock(), []
    some = floods(1000, 10, clock, lambda: cuts.append(1), door, door)
    door.all = [ConnectionCalls(1, "10.0.0.1", 7, 1001), ConnectionCalls(2, "10.0.0.2", 8, 1000)]
    give_up(some, ALARM)
    while not cuts:
        await asyncio.sleep(0)
    assert door.was_cut == [("10.0.0.1", 7)] and len(cuts) == 1 and door.is_holding
    door.held = [Held(("10.0.0.1", 9), 500, 20, 20), Held(("10.0.0.2", 9), 500, 20, 20)]
    while len(cuts) < 2:
        await asyncio.sleep(0)
    clock.now_s = HOLD_S - 0.1
    assert not door.held and door.is_holding
    clock.now_s = HOLD_S + 0.1
    await settled(some)
    assert not door.is_holding and door.num_released == 1
    assert door.turns_s == {TURN_S} and sys.getswitchinterval() == pytest.approx(USUAL_S)
    for _ in range(2):
        clock.now_s += LIST_EVERY_S
        some.beat(50051)
        await settled(some)
    assert door.num_released == 2  # what core accepted as the first was under way
    assert [record.getMessage() for record in caplog.records] == [
        "connections were cut that reset their calls as they began, or were too many: 1 of 10.0.0.1"
    ]  # a flood of them is no flood of lines
    await some.close()


async def test_no_call_is_left_waiting_when_the_gateway_stops_or_the_check_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for ending in ("close", "failure"):
        door = Door()
        some = floods(1000, 10, lambda: 0.0, lambda: None, door, door)
        door.all = [ConnectionCalls(1, "10.0.0.1", 7, 9000)]
        give_up(some, ALARM)
        while not some._is_holding:
            await asyncio.sleep(0)
        assert door.is_holding
        if ending == "close":
            await some.close()
        else:
            monkeypatch.setattr(door, "screen", None)
            await settled(some)
        assert not door.is_holding


async def test_calls_that_end_after_the_guard_was_closed_start_nothing() -> None:
    door = Door()
    some = floods(1000, 10, lambda: 0.0, lambda: None, door, door)
    await some.close()
    give_up(some, 2 * ALARM)  # as the loop cancels what is left
    some.beat(50051)
    assert some._watching is None and some._listing is None
    assert sys.getswitchinterval() == pytest.approx(USUAL_S)


async def test_one_address_has_no_more_connections_than_its_share_and_the_last_to_come_go() -> None:
    door, cuts = Door(), []
    some = floods(1000, 2, lambda: 0.0, lambda: cuts.append(1), door, door)
    door.listed = [("10.0.0.1", 3), ("10.0.0.1", 2), ("10.0.0.2", 1)]
    some.beat(50051)
    await settled(some)
    assert not cuts
    door.listed = [("10.0.0.1", 1), *door.listed, ("10.0.0.1", 4)]
    some._list_s = 0.0
    some.beat(50051)
    await settled(some)
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


@contextlib.asynccontextmanager
async def fresh(port: int) -> "AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]":
    """A client on a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_a_client_that_gives_up_all_that_it_may_have_open_keeps_its_connection() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: None
        calls = [rig.stub.StreamGenerate(stream_request()) for _ in range(3 * ALARM)]
        for _ in calls:
            await rig.ring.next_submit()
        before = connections.peers(rig.port)
        for call in calls:
            call.cancel()
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"
        assert connections.peers(rig.port) == before


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
        async with fresh(rig.port) as stub:  # its address is on probation, and it is looked at
            assert (await stub.Generate(unary_request())).outputs[0].text == "a"
