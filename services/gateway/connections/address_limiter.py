"""Finds connections beyond the limit of one address. Pure: peers are passed in."""

from collections import defaultdict
from collections.abc import Sequence

Peer = tuple[str, int]


class AddressLimiter:
    """Judges all connections each time that they are listed."""

    def __init__(self, max_per_host: int) -> None:
        self._max_per_host = max_per_host
        self._before: set[Peer] = set()

    def judge(self, peers: Sequence[Peer]) -> list[Peer]:
        """Returns the connections to cut: the latest ones of each address with too many."""
        of_hosts: dict[str, list[Peer]] = defaultdict(list)
        for peer in peers:
            of_hosts[peer[0]].append(peer)
        over: list[Peer] = []
        for all_of_it in of_hosts.values():
            if len(all_of_it) > self._max_per_host:
                oldest_first = sorted(all_of_it, key=lambda peer: peer not in self._before)
                over += oldest_first[self._max_per_host :]
        self._before = set(peers) - set(over)
        return over
