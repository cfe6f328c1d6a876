"""A gRPC server that stops by itself is replaced; at the end all are stopped. Includes the cause of a real stop."""

import asyncio
from typing import Any

import grpc
import pytest
from sluice.v1 import inference_pb2_grpc

from sluice_server.services.gateway.connections.listener import PortListener
from sluice_server.services.telemetry.observed import Unobserved
from tests.services.gateway.fake_ring import SETTINGS, generation, running, stream_request, unary_request
from tests.services.gateway.raw_http2 import PREFACE, frame, headers, message, send
from tests.services.gateway.raw_http2 import SETTINGS as HTTP2_SETTINGS

LOCAL = (("grpc.use_local_subchannel_pool", 1),)


class Server:
    """A stand-in for grpc's server."""

    def __init__(self, *, port: int = 1234) -> None:
        self.port = port
        self.error: Exception | None = None
        self.stopped: list[float] = []
        self.is_started = False

    def add_insecure_port(self, address: str) -> int:
        assert not self.port or address in ("127.0.0.1:0", f"127.0.0.1:{self.port}")
        return self.port

    async def start(self) -> None:
        self.is_started = True

    async def wait_for_termination(self, timeout: float) -> bool:
        if self.error is not None:
            raise self.error
        return timeout == 0.0

    async def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)


def listener_of(*servers: Server) -> PortListener:
    made: Any = iter(servers)
    return PortListener(SETTINGS, lambda: next(made))


async def test_a_server_that_runs_is_left_alone() -> None:
    only = Server()
    listener = listener_of(only)
    assert await listener.start() == 1234
    assert not await listener.look_after() and not only.stopped
    await listener.stop(2.0)
    assert only.stopped == [2.0]


async def test_a_server_that_has_stopped_is_replaced_on_its_port() -> None:
    old, new = Server(), Server()
    listener = listener_of(old, new)
    await listener.start()
    old.error = UnicodeDecodeError("utf-8", b"x", 0, 1, "m")
    assert await listener.look_after() and new.is_started
    assert not await listener.look_after()
    await asyncio.sleep(0)
    assert len(old.stopped) == 1 and not new.stopped
    await listener.stop(2.0)
    assert new.stopped == [2.0]


async def test_a_port_that_is_not_free_yet_is_tried_again() -> None:
    old, too_early, new = Server(), Server(port=0), Server()
    listener = listener_of(old, too_early, new)
    await listener.start()
    old.error = RuntimeError()
    assert [await listener.look_after() for _ in range(2)] == [False, True]
    assert new.is_started and not too_early.is_started


def path_frames(path: bytes) -> bytes:
    """The frames of a whole call of that method."""
    known = b"/sluice.v1.InferenceService/Generate"
    assert len(path) == len(known)
    return PREFACE + frame(HTTP2_SETTINGS, 0, 0) + headers(1, "Generate").replace(known, path) + message(1, b"")


@pytest.mark.parametrize(
    "path", [b"/sluice.v1.Inferen\xbeeService/Generate", b"\xff" * 36, b"/\0luice.v1.InferenceService/Generate"]
)
async def test_a_path_that_is_no_text_is_a_method_that_is_not_there_and_touches_no_other_call(path: bytes) -> None:
    counted: list[str] = []

    class Counting(Unobserved):
        def count(self, name: str, **labels: str) -> None:
            counted.append(name)

    async with running(observer=Counting()) as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        for _ in range(4):
            back = await send(rig.port, path_frames(path), 5.0, until=b"grpc-status\x0212")
            assert b"grpc-status\x0212" in back  # UNIMPLEMENTED, as for any name that is not a method's
            assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"  # without wait_for_ready
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}", options=LOCAL) as fresh:
                stub = inference_pb2_grpc.InferenceServiceStub(fresh)
                assert (await stub.Generate(unary_request())).outputs[0].text == "a"
        rig.ring.play(*generation(submit, ["a"]))
        events = [event.WhichOneof("event") async for event in call]
        assert events == ["accepted", "delta", "output_finished", "finished"]
        assert "listener_replaced" not in counted
