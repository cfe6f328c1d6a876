"""Closing a session of the Python SDK: no call and no thread is left on either side."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from sluice import AsyncClient, Client
from sluice.v1 import inference_pb2

TIMEOUT_S = 20


class Server:
    """A server that accepts every open, never ends a call, and takes one generation per stream."""

    def __init__(self) -> None:
        self.num_running = 0
        self._changed = threading.Condition()

    def converse(
        self, frames: Iterator[inference_pb2.ConverseRequest], context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ConverseResponse]:
        self._count(1)
        if not context.add_callback(lambda: self._count(-1)):
            self._count(-1)
        for frame in frames:
            if frame.HasField("open"):
                yield inference_pb2.ConverseResponse(going_away=inference_pb2.GoingAway())
                answer = inference_pb2.ConverseResponse(tag=frame.tag)
                answer.delta.seq = answer.delta.consumed = 1
                yield answer

    def wait_for(self, num: int) -> bool:
        """Waits until that many calls run."""
        with self._changed:
            return self._changed.wait_for(lambda: self.num_running == num, TIMEOUT_S)

    def _count(self, change: int) -> None:
        with self._changed:
            self.num_running += change
            self._changed.notify_all()


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    mine = Server()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(
        mine.converse,
        request_deserializer=inference_pb2.ConverseRequest.FromString,
        response_serializer=inference_pb2.ConverseResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("sluice.v1.InferenceService", {"Converse": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield mine, f"127.0.0.1:{port}"
    server.stop(None).wait()


def readers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "sluice-converse"]


def test_leaving_ends_all_its_calls_and_threads(served: tuple[Server, str]) -> None:
    """This includes a call whose server reads no more while a generation runs on it. A thread that was inside grpc when
    the interpreter ended would keep the process alive."""
    server, address = served
    with Client(address) as client, client.converse() as session:
        for _ in range(2):
            next(iter(session.open("a")))
        assert server.wait_for(2) and len(readers()) == 2
    assert not readers()
    assert server.wait_for(0)


async def test_leaving_ends_all_its_calls_with_asyncio(served: tuple[Server, str]) -> None:
    server, address = served
    async with AsyncClient(address) as client, client.converse() as session:
        for _ in range(2):
            await anext(aiter(session.open("a")))
        assert await asyncio.to_thread(server.wait_for, 2)
        before = asyncio.all_tasks()
    # gRPC's own task takes the status of a call that was cancelled, in a later turn of the loop.
    left = {
        one for one in asyncio.all_tasks() if not getattr(one.get_coro(), "__qualname__", "").startswith("_AioCall")
    }
    assert left == {asyncio.current_task()} and len(before) > 1
    assert await asyncio.to_thread(server.wait_for, 0)
