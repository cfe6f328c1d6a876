"""Which HTTP connections are held, and which one is cut when there are too many. Pure; knows no socket and no clock.

A connection is idle while no request of it is being answered. Idle ones are cut before a new one is refused: those of
the new one's own address where it has its share, else those of the address that has most.
"""

import collections
import dataclasses
import ipaddress
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What connections may take.

    Attributes:
        most: connections at once.
        most_of_address: of them from one address (an IPv6 /64 network is one).
        head_s: seconds for the head of a request, from the connection's start or the head's first byte.
        body_s: seconds for the body behind it.
        write_s: seconds that a response may wait for a client which does not read.
    """

    most: int
    most_of_address: int
    head_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0


class Connection(Protocol):
    """What can be cut."""

    def close(self) -> None:
        """End it at once."""


class Connections:
    """The connections that are open, by address. All methods take time independent of their number, but for a full
    server, which looks at each address once."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._group: dict[Connection, str] = {}
        self._number: collections.Counter[str] = collections.Counter()
        self._idle: dict[str, dict[Connection, None]] = {}  # by address, the oldest first

    def __len__(self) -> int:
        return len(self._group)

    def opened(self, connection: Connection, group: str) -> bool:
        """Take a new connection, cutting an idle one where there is no room; False if it must be refused."""
        if self._number[group] >= self._bounds.most_of_address:
            if not self._cut(group):
                return False
        elif len(self._group) >= self._bounds.most and not self._cut(self._largest()):
            return False
        self._group[connection] = group
        self._number[group] += 1
        self.rests(connection)
        return True

    def works(self, connection: Connection) -> None:
        """A request of it is being answered."""
        if connection in self._group:
            self._idle.get(self._group[connection], {}).pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """It is idle, as the youngest of them."""
        if connection in self._group:
            self._idle.setdefault(self._group[connection], {})[connection] = None

    def closed(self, connection: Connection) -> None:
        """It has ended; also one that was refused or cut."""
        group = self._group.pop(connection, None)
        if group is None:
            return
        idle = self._idle.get(group, {})
        idle.pop(connection, None)
        self._number[group] -= 1
        if not self._number[group]:
            del self._number[group]
            self._idle.pop(group, None)

    def _cut(self, group: str) -> bool:
        oldest = next(iter(self._idle.get(group, ())), None)
        if oldest is None:
            return False
        self.closed(oldest)
        oldest.close()
        return True

    def _largest(self) -> str:
        """The address with most connections, of those that have idle ones."""
        return max((group for group, idle in self._idle.items() if idle), key=self._number.__getitem__, default="")


def group_of(address: str) -> str:
    """What counts as one address: an IPv4 address or an IPv6 /64 network, which is what one customer gets."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
