"""The connections of an engine with those of other hosts that have cache blocks for it."""

import dataclasses
from collections.abc import Mapping

import msgspec
import zmq

from sluice_server.services.ring.keys import RingKeys
from sluice_server.services.transfer.network_frames import MAX_HEADER_BYTES, Request

TCP = "tcp://"
PROBE_S = 1.0  # between two probes of a connection
SILENCE_S = 4.0  # without an answer to a probe
PENDING = 64  # messages to an engine that wait for the network; further ones are dropped
FIRST_REST_S = 1.0  # an engine that let a question pass is not asked; doubles with each further one
MAX_REST_S = 16.0
CURVE_BYTES = 256  # that encryption adds to a frame, and more: a frame over the limit ends its connection for good

encode = msgspec.msgpack.Encoder().encode


def places_of(engines: Mapping[str, str], offset: int) -> dict[str, str]:
    """Returns where engines pass their blocks on, by id, for a table of inboxes: those on TCP, `offset` ports on."""
    found = {}
    for name, address in engines.items():
        if address.startswith(TCP):
            host, _, port = address.rpartition(":")
            found[name] = f"{host}:{int(port) + offset}"
    return found


@dataclasses.dataclass(eq=False, slots=True)
class NetworkPeer:
    """Another engine: its socket, and how it has answered of late."""

    name: str
    address: str
    socket: "zmq.Socket[bytes]"
    rests_until_s: float = 0.0
    refusal: str = ""  # why it gives no blocks
    sends: bool = False  # blocks, as nobody may read its memory
    _num_passed: int = 0  # questions in a row that it let pass

    def answered(self) -> None:
        """Notes that it has answered in time."""
        self._num_passed = 0

    def passed(self, now_s: float) -> None:
        """Lets it rest, as it did not."""
        self.rests_until_s = now_s + min(FIRST_REST_S * 2**self._num_passed, MAX_REST_S)
        self._num_passed = min(self._num_passed + 1, 8)

    def send(self, request: Request) -> bool:
        """Sends a request, unless it is not connected or takes nothing any more; returns whether it was sent."""
        try:
            self.socket.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def connected(
    context: "zmq.Context[zmq.Socket[bytes]]", name: str, address: str, keys: RingKeys, block_bytes: int
) -> NetworkPeer:
    """Returns a connection with an engine, which is made once that is there."""
    socket = context.socket(zmq.DEALER)
    keys.secure_outbox(socket, name)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for an engine that is not connected
    socket.setsockopt(zmq.SNDHWM, PENDING)
    socket.setsockopt(zmq.RCVHWM, 0)  # what was asked for
    socket.setsockopt(zmq.MAXMSGSIZE, max(block_bytes, MAX_HEADER_BYTES) + CURVE_BYTES)
    watch(socket, address)
    socket.connect(address)
    return NetworkPeer(name, address, socket)


def watch(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Has ZeroMQ end connections that are silent, and know addresses of IPv6."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(PROBE_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
