"""The ZeroMQ context of the sockets of a ring, and their keys. Rings of one process may share one: it has a thread."""

import zmq

from sluice_server.services.ring.keys import RingKeys


class Transport:
    """A context, which ends with its last user; `open` it before use. With keys it checks those of all that connect to
    its sockets, so rings that have none use another one."""

    def __init__(self, keys: RingKeys | None = None) -> None:
        self.keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = keys.guard(self.context) if keys is not None else None
        self._num_users = 0

    def open(self) -> None:
        """Keeps the context until `close`."""
        self._num_users += 1

    def close(self) -> None:
        """Ends the use of the context, whose sockets are closed. The last user waits until they have sent all, for
        their linger time at most."""
        self._num_users -= 1
        if self._num_users:
            return
        if self._guard is not None:
            self._guard.stop()
        self.context.term()
