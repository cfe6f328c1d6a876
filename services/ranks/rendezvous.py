"""How the ranks of several hosts find one another before they compute: each tells all others by name where it is.

What is told goes over the sockets of orders and reports, which know every rank's key: rank 0 passes it on. The store
that torch's collectives ask is a view of this; torch's own listens on every address of a host.
"""

from collections.abc import Callable
from datetime import timedelta

from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.messages import Told


class Rendezvous:
    """What the ranks of a group have told."""

    def __init__(self, send: Callable[[Told], None], receive: Callable[[], None]) -> None:
        """`send` tells the others. `receive` waits for something, and hands what was told to `note`."""
        self._send = send
        self._receive = receive
        self._known: dict[str, bytes] = {}

    def tell(self, key: str, value: bytes) -> None:
        """Tells all ranks."""
        self._known[key] = value
        self._send(Told(key, value))

    def note(self, told: Told) -> None:
        """Takes what another rank has told."""
        self._known[told.key] = told.value

    def wait(self, key: str) -> bytes:
        """Returns what a rank tells under this name, once it does. Raises RankLost if one ends."""
        while key not in self._known:
            self._receive()
        return self._known[key]

    def knows(self, key: str) -> bool:
        """Returns whether a rank has told this."""
        return key in self._known


class RendezvousStore(dist.Store):
    """A rendezvous as torch's collectives take it; keys begin with `prefix`."""

    def __init__(self, rendezvous: Rendezvous, prefix: str) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._is_closed = False

    def close(self) -> None:
        """Ignores what is set from now on: threads of a collective may do so, and sockets are not theirs to use."""
        self._is_closed = True

    def set(self, key: str, value: bytes | str) -> None:
        """Tells the others."""
        if not self._is_closed:
            self._rendezvous.tell(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Returns what was told."""
        return self._rendezvous.wait(self._prefix + key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all of these were told; the group's own patience counts, not `timeout`."""
        for key in keys:
            self._rendezvous.wait(self._prefix + key)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all of these were told."""
        return all(self._rendezvous.knows(self._prefix + key) for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, as `wait` has no timeout of its own."""
