"""Storms and garbage: expired deadlines, nonsense frames, too many connections, a collector that does not answer."""

import asyncio
import contextlib
import random
import resource
import shutil
import socket
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
import zmq
from sluice.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.streams import stream_all, varied
from sluice_server.services.gateway.gateway import MOST_RESETS
from sluice_server.services.messages.messages import Cancel, Envelope, Message, Tokens
from sluice_server.services.messages.processes import Probe
from sluice_server.services.ring.frames import FrameWriter
from tests.faults.test_faults_kill import is_serving, nothing_is_left
from tests.system.roles import free_ports
from tests.system.service import Service, generate, serve, spec, wait_until

ROLES = ("engine", "gateway", "tokenizer", "detokenizer")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A short path for the service's own directory: an ipc path has a limit."""
    own = Path(tempfile.mkdtemp(dir="/tmp"))
    yield own
    shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(scope="module")
def first_port() -> int:
    return free_ports(4)[0]


@pytest.fixture(scope="module")
def service(place: Path, first_port: int) -> Iterator[Service]:
    with serve("--metrics-port", str(first_port), environment={"TMPDIR": str(place)}) as running:
        yield running


def deadline_storm(service: Service, num: int) -> Counter[grpc.StatusCode]:
    """Sends many requests whose deadlines pass within 50 ms; returns how they ended."""
    rng, ends = random.Random(5), Counter[grpc.StatusCode]()

    async def one(stub: "inference_pb2_grpc.InferenceServiceAsyncStub") -> None:
        request = inference_pb2.GenerateRequest(spec=spec([rng.randrange(4000) for _ in range(20)], 8))
        try:
            await stub.Generate(request, timeout=rng.random() * 0.05)
            ends[grpc.StatusCode.OK] += 1
        except grpc.aio.AioRpcError as error:
            ends[error.code()] += 1

    async def storm() -> None:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(num // 50):
                await asyncio.gather(*(one(stub) for _ in range(50)))

    asyncio.run(storm())
    return ends


@pytest.mark.parametrize("num", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_deadlines_that_pass_at_once_leave_nothing(service: Service, num: int) -> None:
    """F9. A deadline that cannot be met may also be refused early."""
    ends = deadline_storm(service, num)
    assert sum(ends.values()) == num
    cut = {grpc.StatusCode.UNAVAILABLE} if num > MOST_RESETS else set()  # a deadline that passes resets its call
    assert set(ends) <= cut | {
        grpc.StatusCode.OK,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    wait_until(lambda: nothing_is_left(service), 60, "something is still held after the storm")


def garbage(rng: random.Random, num: int) -> Iterator[bytes]:
    """Random bytes, frames with changed bytes, frames of unknown requests, frames of the wrong kind for a role,
    and one that is too large."""
    envelope = Envelope("0" * 32, "gateway-9")
    messages: list[Message] = [Cancel(envelope), Tokens(envelope, 0, (1, 2)), Probe("x", 1, ("y",))]
    encoded = [msgspec.msgpack.encode(one) for one in messages]
    good = FrameWriter("engine-0", 1).frame(1, encoded)
    yield b"x" * (2 << 20)
    for at in range(num):
        match at % 3:
            case 0:
                yield rng.randbytes(rng.randrange(200))
            case 1:
                changed = bytearray(good)
                for _ in range(rng.randrange(1, 4)):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                yield bytes(changed)
            case 2:
                yield FrameWriter(f"unknown-{at}", 1).frame(at, encoded)


def num_malformed(port: int) -> float:
    """The malformed frames that the process at this endpoint counts."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    (line,) = [one for one in text.splitlines() if one.startswith("sluice_ring_in_total") and 'what="malformed"' in one]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("num", [2000, pytest.param(10_000, marks=pytest.mark.long)])
def test_garbage_on_the_ring_is_dropped_and_counted(service: Service, place: Path, first_port: int, num: int) -> None:
    """Garbage frames are dropped (F8)."""
    (run,) = place.glob("sluice-run-*")
    before = service.children()
    with zmq.Context() as context:
        for role in ROLES:
            with context.socket(zmq.PUSH) as out:
                out.setsockopt(zmq.LINGER, 60_000)
                out.connect(f"ipc://{run}/{role}-0")
                for data in garbage(random.Random(role), num):
                    out.send(data)
    with service.stub() as stub:
        assert generate(stub, spec("import os", 8)).completion_tokens == 8
    assert service.children() == before
    for port in range(first_port, first_port + len(ROLES)):
        wait_until(lambda port=port: num_malformed(port) > num / 4, 60, "garbage is not counted")


def test_a_gateway_without_file_descriptors_recovers(service: Service) -> None:
    """F16; CVE-2023-4785."""
    gateway = service.children()["gateway-0"]
    limits = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (gateway.num_fds() + 40, limits[1]))
    host, port = service.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: is_serving(service), 30, "the gateway did not recover")
    assert service.children()["gateway-0"] == gateway
    with service.stub() as stub:
        assert generate(stub, spec("import os", 8)).completion_tokens == 8


@pytest.mark.long
def test_a_collector_that_does_not_answer_delays_no_request() -> None:
    """A collector that accepts connections and answers nothing delays no request (F13)."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(deaf.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with serve("--otlp-endpoint", endpoint) as service:
            answers = stream_all(service.address, varied(12, 24))
            assert [answer.error for answer in answers] == [""] * 12
        assert accepted
        deaf.shutdown(socket.SHUT_RDWR)
        for one in accepted:
            one.close()
