"""Ends of transfers with the disk, which each rank has for itself. A block is there if it is on every rank. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from sluice_server.engine.kv_cache.moves import Move

End = tuple[Move, bool]  # and whether it succeeded


class DiskEnds:
    """Joins what the ranks of a group report."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_move: defaultdict[Move, list[list[bool]]] = defaultdict(lambda: [[] for _ in range(size)])

    def note(self, rank: int, ends: Sequence[End]) -> list[End]:
        """Takes what has ended on a rank; returns what has now ended on all, good where it is on all."""
        found = []
        for move, is_good in ends:
            each = self._by_move[move]
            each[rank].append(is_good)
            if all(each):
                found.append((move, all([one.pop(0) for one in each])))
                if not any(each):
                    del self._by_move[move]
        return found
