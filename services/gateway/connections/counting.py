"""Counts the streams of each connection, from channelz, gRPC core's own statistics; grpc.aio has no other source."""

import base64
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from grpc._cython import cygrpc

from sluice_server.services.gateway.connections import connections
from sluice_server.services.gateway.connections.address_limiter import Peer
from sluice_server.services.gateway.connections.resets import ConnectionCalls, Counts

PAGE = 500  # sockets that core lists at once
BUSY_BYTES = 1 << 10  # about three dozen calls that are reset


class Counter:
    """Reads the counts of the connections that have received something since the last call. Core takes a third of a
    millisecond for each and holds the interpreter's lock; `connections.received` finds them for a fiftieth of that.
    Must not run on the event loop's thread."""

    def __init__(self) -> None:
        self._servers: list[int] = []
        self._numbers: dict[Peer, int] = {}
        self._received: dict[Peer, int] = {}  # bytes received at the last query of core

    def counts(self, port: int) -> Counts:
        """Returns the counts of the TCP connections to `port`."""
        received = connections.received(port)
        self._received = {peer: num for peer, num in self._received.items() if peer in received}
        busy = {peer: num for peer, num in received.items() if num - self._received.get(peer, 0) >= BUSY_BYTES}
        self._find(busy)
        found = []
        for peer in busy:
            with contextlib.suppress(ValueError, KeyError):  # closed, or still in its handshake
                found.append(_count(self._numbers[peer]))
                self._received[peer] = received[peer]
        return Counts(found, frozenset(self._numbers.values()))

    def _find(self, peers: Iterable[Peer]) -> None:
        """Updates core's numbers of all connections. Servers are listed again, which is slow, only if a connection is
        missing."""
        self._number()
        if not self._numbers.keys() >= set(peers):
            self._servers = [int(one["ref"]["serverId"]) for one in _servers()]
            self._number()

    def _number(self) -> None:
        known = {number: peer for peer, number in self._numbers.items()}
        self._numbers = {}
        for server in self._servers:
            for number in _sockets(server):
                with contextlib.suppress(ValueError, KeyError):  # closed, or without an address
                    self._numbers[known.get(number) or _count(number).peer] = number


def _servers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cygrpc.channelz_get_servers(0)).get("server", [])
    return found


def _sockets(server: int) -> list[int]:
    numbers: list[int] = []
    while True:
        try:
            page = json.loads(cygrpc.channelz_get_server_sockets(server, numbers[-1] + 1 if numbers else 0, PAGE))
        except ValueError:  # the server has gone, as at shutdown
            return []
        numbers += [int(one["socketId"]) for one in page.get("socketRef", [])]
        if page.get("end") or not page.get("socketRef"):
            return numbers


def _count(number: int) -> ConnectionCalls:
    found = json.loads(cygrpc.channelz_get_socket(number))["socket"]
    address = found["remote"]["tcpipAddress"]
    return ConnectionCalls(
        number=number,
        host=connections.plain(base64.b64decode(address["ipAddress"])),
        port=int(address["port"]),
        num_failed=int(found["data"].get("streamsFailed", 0)),
    )
