"""The load generator's way by gRPC, against grpc's own server: what it asks, what it takes for a token, refusals."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from sluice.v1 import inference_pb2

from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.grpc_load import METHOD, calls, has_token
from benchmarks.cpu.open_loop import Completion

ONE = Completion([5, 6], 3)
ACCEPTED, DELTA = inference_pb2.StreamGenerateResponse(), inference_pb2.StreamGenerateResponse()
ACCEPTED.accepted.generation_id = "g"
DELTA.delta.text, DELTA.delta.consumed = "x" * 40_000, 1  # more than a frame
JOINED = inference_pb2.StreamGenerateResponse(accepted=ACCEPTED.accepted, more=[DELTA])

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Context], Awaitable[None]]


class Served:
    """A gRPC server of that method alone, and what it was asked, by whom."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[inference_pb2.StreamGenerateRequest] = []
        self.peers: set[str] = set()
        self._answer = answer

    async def stream(self, request: inference_pb2.StreamGenerateRequest, context: Context) -> None:
        self.asked.append(request)
        self.peers.add(context.peer())
        await self._answer(context)

    @contextlib.asynccontextmanager
    async def listening(self, *options: tuple[str, int]) -> AsyncIterator[str]:
        handler: Any = grpc.unary_stream_rpc_method_handler(
            self.stream,
            request_deserializer=inference_pb2.StreamGenerateRequest.FromString,
            response_serializer=inference_pb2.StreamGenerateResponse.SerializeToString,
        )
        service, name = METHOD[1:].split("/")
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def flown(answer: Answer, num: int = 1, one: Completion = ONE) -> tuple[Flight, Served]:
    """The last of so many flights, one behind the other."""
    served, flight = Served(answer), Flight(0.0, 3)
    async with served.listening() as address, calls(address, "a") as send:
        for _ in range(num):
            await asyncio.wait_for(send(one, flight), 20)
    return flight, served


async def test_a_completion_is_asked_for_as_by_http() -> None:
    flight, served = await flown(lambda context: context.write(DELTA))
    (asked,) = served.asked
    assert (list(asked.spec.token_ids.ids), asked.spec.sampling.max_tokens, asked.spec.adapter) == ([5, 6], 3, "a")
    assert asked.joined_events and asked.spec.stop.ignore_eos and not asked.spec.output.token_records
    assert 0 < flight.first <= flight.end < float("inf")


async def test_a_request_may_be_larger_than_a_frame() -> None:
    _, served = await flown(lambda context: context.write(DELTA), one=Completion([70_000] * 9_000, 3))
    assert len(served.asked[0].spec.token_ids.ids) == 9_000


async def test_a_connection_is_taken_again_and_windows_do_not_fill() -> None:
    async def much(context: Context) -> None:
        for _ in range(30):
            await context.write(DELTA)

    _, served = await flown(much, num=3)
    assert len(served.asked) == 3 and len(served.peers) == 1


async def test_a_first_token_that_is_joined_to_another_event_counts() -> None:
    flight, _ = await flown(lambda context: context.write(JOINED))
    assert 0 < flight.first <= flight.end


@pytest.mark.parametrize("events", [[ACCEPTED], []])
async def test_a_stream_without_a_token_is_a_refusal(events: list[inference_pb2.StreamGenerateResponse]) -> None:
    async def answer(context: Context) -> None:
        for one in events:
            await context.write(one)

    with pytest.raises(ConnectionError, match="without a token"):
        await flown(answer)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_an_error_is_a_refusal(has_begun: bool) -> None:
    async def answer(context: Context) -> None:
        if has_begun:
            await context.write(DELTA)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    with pytest.raises(ConnectionError, match="full"):
        await flown(answer)


async def test_a_server_that_goes_away_is_a_refusal() -> None:
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with listening, calls(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}") as send:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send(ONE, Flight(0.0, 3)), 20)


def test_a_token_is_found_in_whole_messages_only() -> None:
    message = b"".join(len(data).to_bytes(5, "big") + data for data in map(bytes_of, (ACCEPTED, DELTA)))
    assert has_token(message) and not has_token(message[:-1]) and not has_token(message[:3]) and not has_token(b"")


def bytes_of(message: inference_pb2.StreamGenerateResponse) -> bytes:
    return message.SerializeToString()
