"""Passes the memory that ranks share from rank 0 to the others, over a Unix socket in a private directory."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from sluice_server.engine.errors import RankLost
from sluice_server.services.ranks.settings import START_S

MOST = 253  # descriptors that a message may carry
SUFFIX = ".fd"  # behind the path of rank 0's inbox
_PEER = struct.Struct("3i")  # process, user and group


class Offer:
    """Descriptors that other processes of this user can fetch at `path`."""

    def __init__(self, path: str) -> None:
        """Listens at `path`. Raises OSError."""
        self.path = path
        Path(path).unlink(missing_ok=True)  # of an earlier start
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(START_S)
        self._socket.bind(path)
        self._socket.listen()

    def pass_on(self, files: Sequence[int], num: int) -> None:
        """Passes the descriptors to `num` processes of this user. Raises RankLost if they do not fetch it."""
        while num:
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                raise RankLost(f"a rank did not fetch the memory of the group within {START_S:g} s") from None
            with peer, contextlib.suppress(OSError):
                if user_of(peer) == os.geteuid():
                    socket.send_fds(peer, [b"+"], files)
                    num -= 1

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)


@contextlib.contextmanager
def offered(path: str) -> Iterator[Offer]:
    """Listens at `path` within the block."""
    offer = Offer(path)
    try:
        yield offer
    finally:
        offer.close()


def receive(path: str) -> list[int]:
    """Returns the descriptors that rank 0 offers at `path`. Raises RankLost if it does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(START_S)
        try:
            asking.connect(path)
            _, files, _, _ = socket.recv_fds(asking, 1, MOST)
        except OSError as error:
            raise RankLost(
                f"rank 0 does not give the memory of the group at {path}: {error.strerror or error}"
            ) from error
    if not files:
        raise RankLost(f"rank 0 does not give the memory of the group at {path}: is it of another user?")
    return files


def user_of(peer: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    return int(_PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])
