"""An open loop: it sends when it is time, whatever is still open, cuts off what is hopeless, and keeps refusals."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from benchmarks.cpu.goodput import Flight, Goals
from benchmarks.cpu.http_load import connections
from benchmarks.cpu.load_lengths import sharegpt
from benchmarks.cpu.open_loop import Completion, Connect, Send, completions, hopeless, play
from tests.benchmarks.completions_server import EVENTS, Completions

WORK = [Completion([1, 2], 3)] * 5


def answering(wait: asyncio.Event | None = None, error: str = "") -> Connect:
    """A server that answers at once, or after an event; or not at all."""

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Send]:
        async def send(one: Completion, flight: Flight) -> None:
            if wait is not None:
                await wait.wait()
            if error:
                raise ConnectionError(error)
            flight.first, flight.end = flight.due + 0.1, flight.due + 0.2

        yield send

    return connect


async def test_requests_are_sent_though_those_before_have_not_ended() -> None:
    gate = asyncio.Event()

    def opened(flights: Sequence[Flight], now: float) -> bool:
        if len(flights) == 4:  # the last is about to be sent, none has been answered
            gate.set()
        return False

    flights = await asyncio.wait_for(play(answering(gate), [0.0] * 5, WORK, opened), 10)
    assert [flight.ttft for flight in flights] == pytest.approx([0.1] * 5)


async def test_times_are_those_at_which_requests_were_due() -> None:
    flights = await play(answering(), [0.0, 0.02, 0.03], WORK[:3])
    assert [flight.due - flights[0].due for flight in flights] == pytest.approx([0.0, 0.02, 0.03])


async def test_what_is_given_up_is_cut_off() -> None:
    gave_up = hopeless(5, Goals(ttft=1e-6))
    flights = await asyncio.wait_for(play(answering(asyncio.Event()), [0.0] * 5, WORK, gave_up), 10)
    assert flights and all(flight.tpot == float("inf") for flight in flights)


async def test_a_refusal_is_kept() -> None:
    flights = await play(answering(error="503"), [0.0, 0.0], WORK[:2])
    assert [(flight.error, flight.ttft) for flight in flights] == [("503", float("inf"))] * 2


@pytest.mark.parametrize(("events", "error"), [(EVENTS, ""), (EVENTS[:1], "a stream ended with")])
async def test_connections_are_taken_again(events: tuple[bytes, ...], error: str) -> None:
    server = Completions(events=events)
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with connections(port, "bench") as send:
            for at in range(3):
                flight = Flight(0.0, 4)
                if error:
                    with pytest.raises(ConnectionError, match=error):
                        await send(Completion([at], 4), flight)
                else:
                    await send(Completion([at], 4), flight)
                    assert 0 < flight.first <= flight.end < float("inf")
    assert server.num_connections == (3 if error else 1)
    assert [body["prompt"] for body in server.bodies] == [[0], [1], [2]]


async def test_a_connection_that_the_server_has_closed_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server, readers, connect = Completions(is_kept=False), [], asyncio.open_connection

    async def recorded(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = await connect(host, port)
        readers.append(connection[0])
        return connection

    async def at_end(reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            await asyncio.sleep(0.001)

    monkeypatch.setattr(asyncio, "open_connection", recorded)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    async with listening, connections(listening.sockets[0].getsockname()[1], "bench") as send:
        for at in range(2):
            await send(Completion([1], 4), Flight(0.0, 4))
            await asyncio.wait_for(at_end(readers[at]), 10)
    assert server.num_connections == 2


async def test_a_server_that_goes_away_is_a_refusal() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]))
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as listening:
        connect = partial(connections, listening.sockets[0].getsockname()[1], "bench")
        (flight,) = await play(connect, [0.0], WORK[:1])
    assert flight.error and flight.ttft == float("inf")


def test_requests_of_one_seed_have_equal_lengths_for_every_vocabulary() -> None:
    few, many = (completions(20, sharegpt(), vocab, seed=4) for vocab in (10, 1000))
    assert [(len(one.prompt), one.num_tokens) for one in few] == [(len(one.prompt), one.num_tokens) for one in many]
    assert max(max(one.prompt) for one in few) < 10 <= max(max(one.prompt) for one in many)
    assert few != completions(20, sharegpt(), 10, seed=5)
