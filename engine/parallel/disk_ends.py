"""Ends of transfers with the disk, which each rank has for itself. A block is there if it is on every rank. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.parallel.messages import Moved

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

    def of_all(self, own: Sequence[End], told: Sequence[Moved]) -> tuple[list[End], list[Move]]:
        """Takes what has ended on rank 0 and what the others have told; returns what has now ended on all, and the
        removals, on all, of what failed on one."""
        ended = self.note(0, own)
        for one in told:
            ended += self.note(one.rank, one.ended)
        return ended, [Move(MoveKind.REMOVE, -1, -1, move.name) for move, is_good in ended if not is_good]
