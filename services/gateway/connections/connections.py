"""The connections of this process's gRPC servers: core's counts of their streams, and a way to end one.

Core counts for channelz, its own view of itself; grpc.aio has no other, and no way to close a connection. So the socket
is found by its peer among the files of this process, and shut down: core then sees its end. Linux; elsewhere, and for
Unix sockets, whose peers have no names, nothing is found.
"""

import base64
import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from grpc._cython import cygrpc

from services.gateway.connections.resets import ConnectionCalls

FILES = "/proc/self/fd"
PAGE = 500  # sockets, as many as core lists at once
CHUNK = 1 << 20


def num_failed() -> int:
    """Calls that ended without a status of ours, over all connections that ever were."""
    return sum(int(one["data"].get("callsFailed", 0)) for one in _servers())


def counts() -> list[ConnectionCalls]:
    """Of every connection over TCP. Takes a tenth of a millisecond for each: not for the loop's thread."""
    found = []
    for server in _servers():
        for number in _sockets(int(server["ref"]["serverId"])):
            with contextlib.suppress(ValueError, KeyError):  # it has gone, or has no address
                found.append(_count(number))
    return found


def cut(peers: Iterable[tuple[str, int]]) -> int:
    """End the connections with these peers, and drop what they have sent; how many were found."""
    wanted, num_cut = set(peers), 0
    for name in os.listdir(FILES) if os.path.isdir(FILES) else ():
        with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
            num_cut += _cut_if(int(name), wanted)
    return num_cut


def peers(port: int) -> list[tuple[str, int]]:
    """Of the connections of this process to its `port`, handshakes included. Ten microseconds for each file."""
    found = []
    for name in os.listdir(FILES) if os.path.isdir(FILES) else ():
        with contextlib.suppress(OSError), _socket(int(name)) as own:
            if own.getsockname()[1] == port:
                found.append(_peer(own))
    return found


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    """A file of this process that is a socket of TCP. Raises OSError for any other."""
    copy = os.dup(number)  # what it is cannot change meanwhile, and closing it leaves core's own alone
    try:
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            raise OSError
        own = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with own:
        if own.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError
        yield own


def _cut_if(number: int, wanted: set[tuple[str, int]]) -> bool:
    with _socket(number) as own:
        if _peer(own) not in wanted:
            return False
        own.shutdown(socket.SHUT_RDWR)
        _drain(own)
    return True


def _drain(shut: socket.socket) -> None:
    """Take what had come before, which core would still read: it may be megabytes of frames."""
    with contextlib.suppress(BlockingIOError):
        while shut.recv(CHUNK, socket.MSG_DONTWAIT):
            pass


def _peer(own: socket.socket) -> tuple[str, int]:
    host, port = own.getpeername()[:2]
    return _plain(socket.inet_pton(own.family, host.partition("%")[0])), port


def _plain(packed: bytes) -> str:
    """An address as text; one of IPv4 that is told as one of IPv6 as what it is."""
    if len(packed) == 16 and packed.startswith(b"\0" * 10 + b"\xff\xff"):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _servers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cygrpc.channelz_get_servers(0)).get("server", [])
    return found


def _sockets(server: int) -> list[int]:
    numbers: list[int] = []
    while True:
        page = json.loads(cygrpc.channelz_get_server_sockets(server, numbers[-1] + 1 if numbers else 0, PAGE))
        numbers += [int(one["socketId"]) for one in page.get("socketRef", [])]
        if page.get("end") or not page.get("socketRef"):
            return numbers


def _count(number: int) -> ConnectionCalls:
    told = json.loads(cygrpc.channelz_get_socket(number))["socket"]
    address = told["remote"]["tcpipAddress"]
    return ConnectionCalls(
        number=number,
        host=_plain(base64.b64decode(address["ipAddress"])),
        port=int(address["port"]),
        num_failed=int(told["data"].get("streamsFailed", 0)),
    )
