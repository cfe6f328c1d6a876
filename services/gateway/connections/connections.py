"""The TCP sockets of this process's gRPC servers: lists them, and holds, releases or ends connections.

grpc.aio has no way to close a connection. So the socket is found by its peer among the open files of this process and
shut down; gRPC core then sees the end of the connection. Works on Linux. Elsewhere, and for Unix sockets, whose peers
have no names, nothing is found.

A held connection does not wake gRPC core: Linux wakes core only when more than SO_RCVLOWAT bytes have come, a value
that new connections inherit from the listening socket. Setting it to 1 wakes core at once.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from sluice_server.services.gateway.connections.address_limiter import Peer
from sluice_server.services.gateway.connections.screen import Held, held

FILES = "/proc/self/fd"
CHUNK = 1 << 20
HOLD_BYTES = 1 << 18  # more than a flood sends between two screenings
PEEK_BYTES = 1 << 16
RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in Linux's tcp_info


def cut(peers: Iterable[Peer]) -> int:
    """Ends the connections with these peers and drops what they have sent; returns how many were found."""
    wanted, num_cut = set(peers), 0
    for name in os.listdir(FILES) if os.path.isdir(FILES) else ():
        with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
            num_cut += _cut_if(int(name), wanted)
    return num_cut


def peers(port: int) -> list[Peer]:
    """Returns the peers of the connections to `port`, handshakes included. Takes ten microseconds per open file."""
    found = []
    for own in _opened(port):
        with contextlib.suppress(OSError):  # a listening socket, or closed meanwhile
            found.append(_peer(own))
    return found


def received(port: int) -> dict[Peer, int]:
    """Returns the bytes received on each connection to `port`."""
    found = {}
    for own in _opened(port):
        with contextlib.suppress(OSError, struct.error):  # a listening socket, closed, or not supported
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
            found[_peer(own)] = RECEIVED.unpack(info)[0]
    return found


def hold(port: int) -> None:
    """Holds back the data of new connections to `port` until `screen` or `release` lets it through."""
    for own in _opened(port):
        if _is_listening(own):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HOLD_BYTES)


def screen(port: int, judge: Callable[[Sequence[Held]], tuple[Sequence[Peer], Sequence[Peer]]]) -> list[Peer]:
    """Passes the held connections to `judge`; releases and cuts those that it names. Returns those that were cut. Takes
    two microseconds per open file."""
    with contextlib.ExitStack() as stack:
        found = dict(_held(port, stack))
        go, over = judge([_held_by(peer, own) for peer, own in found.items()])
        for peer in go:
            _let_go(found[peer])
        for peer in over:
            _end(found[peer])
        return list(over)


def release(port: int) -> None:
    """Stops holding: new connections pass, and held ones are released. A connection that core accepts meanwhile may
    stay held until the next call."""
    for own in _opened(port):
        if _is_listening(own):
            _let_go(own)
    with contextlib.ExitStack() as stack:
        for _, own in _held(port, stack):
            _let_go(own)


def _held(port: int, stack: contextlib.ExitStack) -> Iterator[tuple[Peer, socket.socket]]:
    for name in os.listdir(FILES) if os.path.isdir(FILES) else ():
        with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
            if _least(int(name)) > 1:
                own = stack.enter_context(_socket(int(name)))
                if own.getsockname()[1] == port and not _is_listening(own):
                    yield _peer(own), own


def _least(number: int) -> int:
    """Returns SO_RCVLOWAT of a socket. The file number may be closed or reused meanwhile, so it is only read."""
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, number)
    try:
        return own.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    finally:
        own.detach()


def _held_by(peer: Peer, own: socket.socket) -> Held:
    data = b""
    with contextlib.suppress(OSError):  # nothing has come, or the connection is closed
        data = own.recv(PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return held(peer, data)


def _let_go(own: socket.socket) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _is_listening(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _opened(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process at `port`, including the listening one."""
    for name in os.listdir(FILES) if os.path.isdir(FILES) else ():
        with contextlib.suppress(OSError), _socket(int(name)) as own:
            if own.getsockname()[1] == port:
                yield own


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    """Opens a TCP socket by its file number in this process. Raises OSError for any other file."""
    copy = os.dup(number)  # a copy cannot be reused meanwhile; closing it leaves core's file open
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


def _cut_if(number: int, wanted: set[Peer]) -> bool:
    with _socket(number) as own:
        if _peer(own) not in wanted:
            return False
        _end(own)
    return True


def _end(own: socket.socket) -> None:
    """Ends a connection. Drains it first, because core would still read what has come (maybe megabytes of frames);
    shuts it down, which wakes core; and drains it again."""
    _drain(own)
    with contextlib.suppress(OSError):  # the peer has closed it first
        own.shutdown(socket.SHUT_RDWR)
    _drain(own)
    _let_go(own)


def _drain(own: socket.socket) -> None:
    with contextlib.suppress(OSError):  # nothing is left
        while own.recv(CHUNK, socket.MSG_DONTWAIT):
            pass


def _peer(own: socket.socket) -> Peer:
    host, port = own.getpeername()[:2]
    return plain(socket.inet_pton(own.family, host.partition("%")[0])), port


def plain(packed: bytes) -> str:
    """Returns a packed address as text; an IPv4 address mapped into IPv6 as IPv4."""
    if len(packed) == 16 and packed.startswith(b"\0" * 10 + b"\xff\xff"):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
