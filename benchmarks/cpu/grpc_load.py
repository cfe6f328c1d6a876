"""A way to send completions for an open loop by gRPC, as light as that by HTTP: connections that are kept, and messages
of which none is parsed behind the first token.

What makes the load shares the processors with the server: a gRPC library for Python takes three to four times as much
of them as the way by HTTP, which says nothing of the server.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from sluice.v1 import inference_pb2, types_pb2

from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.http2_calls import Http2Calls
from benchmarks.cpu.open_loop import Completion, Send

METHOD = "/sluice.v1.InferenceService/StreamGenerate"
PREFIX = 5  # bytes before a message: whether it is compressed, and its length


@contextlib.asynccontextmanager
async def calls(address: str, adapter: str = "") -> AsyncIterator[Send]:
    """A way to send on connections that are taken again when they are free. `adapter`: the name of one, "" for the
    model itself."""
    host, _, port = address.rpartition(":")
    free: list[Http2Calls] = []
    taken: set[Http2Calls] = set()

    async def send(one: Completion, flight: Flight) -> None:
        while free and free[-1].is_over:
            free.pop().close()
        connection = free.pop() if free else Http2Calls(*await asyncio.open_connection(host, int(port)))
        taken.add(connection)
        await _fly(connection, request_of(one, adapter), flight)
        taken.discard(connection)
        free.append(connection)

    try:
        yield send
    finally:
        for connection in (*taken, *free):
            connection.close()


def request_of(one: Completion, adapter: str = "") -> inference_pb2.StreamGenerateRequest:
    """The request for a completion: text only, and events that are ready together in one message."""
    spec = types_pb2.GenerationSpec(
        token_ids=types_pb2.TokenIds(ids=one.prompt),
        adapter=adapter,
        sampling=types_pb2.SamplingParams(max_tokens=one.num_tokens, temperature=0.0),
        stop=types_pb2.StopConditions(ignore_eos=True),
        output=types_pb2.OutputOptions(token_records=False),
    )
    return inference_pb2.StreamGenerateRequest(spec=spec, joined_events=True)


async def _fly(connection: Http2Calls, request: inference_pb2.StreamGenerateRequest, flight: Flight) -> None:
    """Sends a request and reads its answer. Raises ConnectionError for an answer that is none."""
    before, has_begun = b"", False
    async for part in connection.stream(METHOD, request.SerializeToString()):
        if not has_begun:
            before += part
            has_begun = has_token(before)
            if has_begun:
                flight.first = time.perf_counter()
    if not has_begun:
        raise ConnectionError("a stream ended without a token")
    flight.end = time.perf_counter()


def has_token(answer: bytes) -> bool:
    """Whether the whole messages of an answer's beginning have text or tokens."""
    while len(answer) >= PREFIX and len(answer) >= PREFIX + (size := int.from_bytes(answer[1:PREFIX], "big")):
        message = inference_pb2.StreamGenerateResponse.FromString(answer[PREFIX : PREFIX + size])
        if any(event.HasField("delta") for event in (message, *message.more)):
            return True
        answer = answer[PREFIX + size :]
    return False
