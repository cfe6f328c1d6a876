"""Decides which new connections may reach gRPC core while addresses are on probation. Pure: bytes and time are passed
in.

Core processes at once all that a new connection has sent: hundreds of calls before it can be cut. So during a flood the
operating system holds back the data of new connections until it has been inspected here. For an address on probation, a
connection that begins by resetting its calls is cut, and of the others a limited number per second is released.
Connections of all other addresses are released at once.
"""

import dataclasses
from collections.abc import Callable, Sequence

from sluice_server.services.gateway.connections.address_limiter import Peer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = 9
HEADERS, RST_STREAM = 1, 3
MOST_RESETS = 16  # in the first data of a connection; normal clients have nothing to reset yet
PER_SECOND, BURST = 8.0, 8.0  # released connections of an address on probation; each may flood once, for 15 ms
MOST_LOOKS = 4  # at a connection that sends more each time


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A held connection, and the data on it that core has not read: bytes, HEADERS frames and RST_STREAM frames."""

    peer: Peer
    num_bytes: int
    num_calls: int
    num_resets: int


@dataclasses.dataclass(slots=True)
class _PeekedConnection:
    num_bytes: int
    num_looks: int


def held(peer: Peer, data: bytes) -> Held:
    """Counts the HEADERS and RST_STREAM frames that a connection has sent; stops just above the limit of resets. Data
    that is not plain HTTP/2 counts as one call."""
    if not data.startswith(PREFACE):
        return Held(peer, len(data), 1, 0)
    at, num_calls, num_resets = len(PREFACE), 0, 0
    while at + FRAME_HEADER <= len(data) and num_resets <= MOST_RESETS:
        num_calls += data[at + 3] == HEADERS
        num_resets += data[at + 3] == RST_STREAM
        at += FRAME_HEADER + int.from_bytes(data[at : at + 3])
    return Held(peer, len(data), num_calls, num_resets)


class Screen:
    """Judges all held connections each time that they are inspected."""

    def __init__(self, is_suspect: Callable[[str], bool]) -> None:
        """`is_suspect` returns whether an address is on probation."""
        self._is_suspect = is_suspect
        self._waiting: dict[Peer, _PeekedConnection] = {}
        self._tokens: dict[str, tuple[float, float]] = {}  # by address: tokens left, and when they were counted

    def judge(self, held: Sequence[Held], now_s: float) -> tuple[list[Peer], list[Peer]]:
        """Returns the connections to release and those to cut. The others stay held; the first to come goes first."""
        places = {peer: place for place, peer in enumerate(self._waiting)}
        held = sorted(held, key=lambda one: places.get(one.peer, len(places)))
        self._waiting = {
            one.peer: self._waiting.get(one.peer, _PeekedConnection(-1, 0))
            for one in held
            if self._is_suspect(one.peer[0])
        }
        go: list[Peer] = []
        cut: list[Peer] = []
        for one in held:
            if one.peer not in self._waiting:
                go.append(one.peer)
            elif one.num_resets > MOST_RESETS:
                cut.append(one.peer)
            elif self._has_said_all(one) and self._take(one.peer[0], now_s):
                go.append(one.peer)
        return go, cut

    def _has_said_all(self, one: Held) -> bool:
        """Whether the connection has sent a call and nothing since the last look, or had `MOST_LOOKS` looks."""
        waiting = self._waiting[one.peer]
        waiting.num_looks += one.num_bytes > 0
        is_done = one.num_calls > 0 and one.num_bytes == waiting.num_bytes
        waiting.num_bytes = one.num_bytes
        return one.num_bytes > 0 and (is_done or waiting.num_looks >= MOST_LOOKS)

    def _take(self, host: str, now_s: float) -> bool:
        level, then_s = self._tokens.get(host, (BURST, now_s))
        level = min(BURST, level + PER_SECOND * (now_s - then_s))
        self._tokens[host] = (level - (level >= 1.0), now_s)
        return level >= 1.0
