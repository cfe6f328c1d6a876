"""A gRPC server that stops by itself is replaced; at the end all are stopped. And what does it to a real one."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from services.gateway.listener import Listener
from tests.services.gateway.fake_ring import SETTINGS, Rig, generation, running, stream_request, text_of, unary_request
from tests.services.gateway.raw_http2 import PREFACE, frame, headers, message, send
from tests.services.gateway.raw_http2 import SETTINGS as HTTP2_SETTINGS

KILLER = (
    PREFACE
    + frame(HTTP2_SETTINGS, 0, 0)
    + headers(1, "x").replace(b"InferenceS", b"Inferen\xbeeS")  # not UTF-8
    + message(1, b"")
)


MODULE = "tests.services.gateway.test_listener"


class Server:
    """Stands for grpc's."""

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


def listener_of(*servers: Server) -> Listener:
    made: Any = iter(servers)
    return Listener(SETTINGS, lambda: next(made))


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


async def served(rig: Rig) -> None:
    async with asyncio.timeout(20):
        answer = await rig.stub.Generate(unary_request(), wait_for_ready=True)
    assert answer.outputs[0].text == "a"


async def scenario() -> None:
    """Calls are taken again, and those that run go on."""
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        events = aiter(call)
        assert [(await anext(events)).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        await send(rig.port, KILLER, 0.5)
        await served(rig)
        rig.ring.play(text_of(submit, 1, "b", last=True))
        assert [event.WhichOneof("event") async for event in events] == ["delta", "output_finished", "finished"]


@pytest.mark.long
def test_a_path_that_is_not_utf_8_leaves_no_deaf_gateway() -> None:
    # In processes of their own: grpc 1.85.1 sometimes goes down with it, and its gateway is then started again.
    ends = [subprocess.run([sys.executable, "-m", MODULE], timeout=60, check=False).returncode for _ in range(6)]
    assert all(end <= 0 for end in ends) and ends.count(0) >= 3, ends


if __name__ == "__main__":
    asyncio.run(scenario())
