"""A TCP proxy that cuts or holds a connection at a given byte. It forwards bytes without parsing them."""

import contextlib
import socket
import threading
from collections.abc import Iterator

CHUNK = 256  # small, so that the harm is done where it is meant


class Proxy:
    """Passes connections on to `target`, and harms the first `num_harmed` that carry `harm_after` bytes from there.

    Attributes:
        address: where it listens.
        harmed: set at the first harm.
    """

    def __init__(self, target: str, harm_after: int, num_harmed: int, *, holds: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._harm_after = harm_after
        self._left = num_harmed
        self._holds = holds
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.harmed = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        """Lets held connections go on."""
        self._released.set()

    def close(self) -> None:
        """Close everything."""
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._open):
            _end(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    _end(client)
                    continue
                self._open += [client, server]
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        _end(client, server)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)
                num_bytes += len(data)
                if num_bytes >= self._harm_after and self._takes_harm():
                    self.harmed.set()
                    if not self._holds:
                        break
                    self._released.wait()
        _end(server, client)

    def _takes_harm(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@contextlib.contextmanager
def cutting(target: str, after: int, num: int = 1) -> Iterator[Proxy]:
    """Cuts the first `num` connections that carry `after` bytes."""
    proxy = Proxy(target, after, num, holds=False)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def holding(target: str, after: int) -> Iterator[Proxy]:
    """Holds the first connection that carries `after` bytes, until it is released."""
    proxy = Proxy(target, after, 1, holds=True)
    try:
        yield proxy
    finally:
        proxy.close()
