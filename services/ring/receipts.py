"""Accepts or drops frames by sender, the sender's boot epoch and frame number. Pure: no I/O.

A gap in the numbers means lost frames, a repeated number a repeated frame, an older epoch a stale sender.
"""

from collections import Counter


class Receipts:
    """The last frame of each sender. `counts` has the numbers of stale, repeated and lost frames."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: dict[str, tuple[int, int]] = {}  # sender → (epoch, seq)

    def accept(self, sender: str, epoch: int, seq: int) -> bool:
        """Record a frame. Returns False if it is stale or repeated."""
        known, last = self._last.get(sender, (0, 0))
        if epoch < known:
            self.counts["stale"] += 1
            return False
        if epoch > known:
            last = 0
        if seq <= last:
            self.counts["repeated"] += 1
            return False
        # Frames before the first one of an epoch are not counted as lost: this process may have started later.
        if last:
            self.counts["lost"] += seq - last - 1
        self._last[sender] = (epoch, seq)
        return True
