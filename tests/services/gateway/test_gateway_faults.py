"""An exception in a gateway: in the handler of any RPC, behind it, and while a message of the ring is handled."""

import inspect
import logging
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from sluice.v1 import inference_pb2

from sluice_server.engine.errors import Code, stage_lost
from sluice_server.services.gateway.calls.control import Control
from sluice_server.services.gateway.calls.converse import Converse
from sluice_server.services.gateway.calls.guard import SCOPES
from sluice_server.services.gateway.calls.inference import Inference
from sluice_server.services.gateway.oip.service import OpenInference
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.vllm.service import SERVICE, VllmEngine
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Failed, Message, Text, failed
from sluice_server.services.messages.processes import Role
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.telemetry.logs import FIELDS
from tests.services.gateway.fake_ring import Rig, running, settings, stream_request, unary_request
from tests.services.ring.one_stage import passed_on

TRACE, SECRET = "ab" * 16, "0x7f3a99 of another tenant"
PARENT = (("traceparent", f"00-{TRACE}-{'cd' * 8}-01"),)
VLLM = f"/{SERVICE.full_name}/"
ENVELOPE = Envelope("0000000500000000000000000000000a", "gateway-0", traceparent=PARENT[0][1])


async def broken(*_: object) -> NoReturn:
    raise RuntimeError(SECRET)


def broken_at_once(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(SECRET)


def handlers() -> dict[str, tuple[type, str]]:
    """Every RPC of ours, and its handler."""
    known = {
        (owner is VllmEngine, name.replace("_", "").lower()): (owner, name)
        for owner in (Inference, Converse, Control, OpenInference, VllmEngine)
        for name, _ in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    named = {path: known.get((path.startswith(VLLM), path.rpartition("/")[2].lower())) for path in SCOPES}
    return {path: found for path, found in named.items() if found is not None}


def raw(rig: Rig, path: str) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
    return rig.channel.unary_stream(path, request_serializer=bytes)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.levelno >= logging.ERROR]


def assert_told(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.INTERNAL
    assert str(error.details()).startswith("the gateway failed ") and SECRET not in str(error)


def assert_logged(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog)
    assert vars(line)[FIELDS]["trace_id"] == TRACE and vars(line)[FIELDS]["role"] == "gateway"
    assert SECRET in logging.Formatter().format(line)


def test_the_walk_knows_the_rpcs() -> None:
    assert len(handlers()) > 15


@pytest.mark.parametrize("path", handlers())
async def test_a_handler_that_raises_tells_its_client_nothing_of_that(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = handlers()[path]
    monkeypatch.setattr(owner, name, broken)
    async with running(settings(vllm_listen="127.0.0.1:0")) as rig:
        port = rig.gateway.vllm_port if path.startswith(VLLM) else rig.port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                    path, request_serializer=bytes
                )
                await anext(aiter(call(b"", metadata=PARENT)))
    assert_told(caught.value)
    assert TRACE in str(caught.value.details())
    assert_logged(caplog)


async def test_what_raises_behind_a_handler_is_one_status_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:
        monkeypatch.setattr(RequestManager, "open", broken_at_once)
        tokenize = inference_pb2.TokenizeRequest(text="a")
        for call in (
            lambda: rig.stub.Generate(unary_request(), metadata=PARENT),
            lambda: rig.stub.Tokenize(tokenize, metadata=PARENT),
            lambda: anext(aiter(rig.stub.StreamGenerate(stream_request(), metadata=PARENT))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert_told(caught.value)
            assert_logged(caplog)
            caplog.clear()


class Home:
    """A gateway's stage that raises on text."""

    progress = 0

    def __init__(self) -> None:
        self.taken: list[Message] = []

    def handle(self, message: Message) -> None:
        self.taken.append(message)
        if isinstance(message, Text):
            raise RuntimeError(SECRET)

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Does nothing."""


async def test_a_message_that_a_gateway_cannot_take_ends_its_request_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home()

    def make(ring: RingLoop) -> Home:
        return home

    text = Text(ENVELOPE, 0, (TokenRecord(1, b"a"),), "a")
    came = await passed_on(Role.GATEWAY, make, [text], tmp_path, lambda came: bool(came))
    assert [type(one).__name__ for one in came] == ["Cancel"]
    (told,) = [one for one in home.taken if isinstance(one, Failed)]
    assert told.message.startswith("the gateway failed ") and SECRET not in told.message
    assert_logged(caplog)


@pytest.mark.parametrize(("code", "is_cancelled"), [(Code.INTERNAL, True), (Code.INVALID_ARGUMENT, False)])
async def test_what_broke_in_the_ring_is_cancelled_everywhere(code: Code, *, is_cancelled: bool) -> None:
    """The stages before the failing one go on with the request unless it is cancelled."""
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        error = stage_lost("engine")
        error.code = code
        rig.lane.handle(failed(submit.envelope, error))
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(call))
        assert (submit.envelope.request_id in rig.ring.cancels) is is_cancelled
