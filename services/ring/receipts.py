"""Which frames count: by sender, its boot and its count of them. Pure.

A gap is loss, a number twice is repetition, an older boot than one that was heard is a ghost.
"""

from collections import Counter


class Receipts:
    """What was received of each sender. `counts` has frames that were stale or repeated, and those that never came."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: dict[str, tuple[int, int]] = {}  # sender → (epoch, seq)

    def accept(self, sender: str, epoch: int, seq: int) -> bool:
        """Whether a frame counts; it is noted."""
        known, last = self._last.get(sender, (0, 0))
        if epoch < known:
            self.counts["stale"] += 1
            return False
        if epoch > known:
            last = 0
        if seq <= last:
            self.counts["repeated"] += 1
            return False
        # Before the first frame of an epoch nothing is known to be missing: this process may be the younger one.
        if last:
            self.counts["lost"] += seq - last - 1
        self._last[sender] = (epoch, seq)
        return True
