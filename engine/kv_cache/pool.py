"""The block pool: reference counts and doubly linked free lists over flat arrays, every operation O(1).

    0 ──────────── num_blocks ──────────── size
    │ held: refs > 0 │ free: refs == 0, in one list for each `EvictionClass`, from least to most recently released │
                                           │ offline: refs < 0, without memory; in no list │

A free block may still be named by the prefix index (reclaimable). Sharing it again takes it out of the middle of its
list, hence the double links. `resize` moves the boundary between blocks in use and offline ones; blocks above it that
are still held go offline when they are released, unless their contents are moved below it first. Blocks least worth
keeping are allocated first. Behind the last id lies the null block, which is never free and never written: it replaces
blocks that no step reads any more. Pure: block ids only, no tokens, hashes or requests.
"""

import enum
from array import array
from collections.abc import Iterator

OFFLINE = -1  # references of a block without memory


class EvictionClass(enum.IntEnum):
    """How much a free block is worth keeping: `allocate` takes the lowest class first, and the oldest block of it."""

    NOT = 0  # has no name, so it cannot be shared again; here the newest first: the system has backed its memory
    NORMAL = 1
    LONG = 2  # left by a request of high priority


class BlockPool:
    """Owns the ids 0 … size-1. Invariant: `free + held + offline = size`; `check()` asserts it."""

    def __init__(self, num_blocks: int, size: int = 0) -> None:
        """`size`: blocks that it may grow to; 0: as many as there are."""
        if num_blocks < 1 or 0 < size < num_blocks:
            raise ValueError(f"a pool of {num_blocks} of {size} blocks")
        self.size = size or num_blocks
        self.num_blocks = self.size  # that may be used
        self.num_free = self.size
        self.num_offline = 0
        self.reached = 0  # blocks that were ever in use: the first ones, as `allocate` takes unused ones in order
        size = self.size
        self._refs: array[int] = array("i", [0]) * size
        self._refs.append(1)  # the null block's own
        # Index size + keep is the sentinel of a ring: its next is the list's head, its prev the tail.
        sentinels = range(size, size + len(EvictionClass))
        self._next: array[int] = array("i", [*range(1, size + 1), *sentinels])
        self._prev: array[int] = array("i", [size, *range(size), *sentinels[1:]])
        self._next[size], self._prev[size] = 0, size - 1  # all are in the first list
        self.resize(num_blocks)

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one holder."""
        return self.size - self.num_free - self.num_offline

    @property
    def null(self) -> int:
        """The null block, which replaces freed blocks in a table."""
        return self.size

    def resize(self, num_blocks: int) -> list[int]:
        """Sets how many blocks may be used: the first ones. Returns those that go offline now, as they are free."""
        assert 1 <= num_blocks <= self.size, f"{num_blocks} of {self.size} blocks"
        before, self.num_blocks = self.num_blocks, num_blocks
        left = [block for block in range(num_blocks, before) if self._refs[block] == 0]
        for block in left:
            self._unlink(block)
            self._take_offline(block)
        for block in range(before, num_blocks):
            if self._refs[block] == OFFLINE:
                self._refs[block] = 0
                self.num_offline -= 1
                self._insert(block, self.size + EvictionClass.NOT)
        self.reached = min(self.reached, num_blocks)
        return left

    def outside(self, limit: int) -> list[int]:
        """Returns up to `limit` blocks that are held although they may not be used any more, the last ones."""
        found: list[int] = []
        if limit < 1 or self.size - self.num_offline == self.num_blocks:  # all others are offline
            return found
        for block in range(self.size - 1, self.num_blocks - 1, -1):
            if self._refs[block] > 0:
                found.append(block)
                if len(found) == limit:
                    break
        return found

    def refs(self, block: int) -> int:
        """Returns the number of tables that hold `block`."""
        return self._refs[block]

    def allocate(self) -> int:
        """Takes the free block least worth keeping, with one reference. The caller has checked `num_free`."""
        assert self.num_free > 0, "allocate from an empty pool"
        sentinel = self.size
        while self._next[sentinel] == sentinel:
            sentinel += 1
        block = self._next[sentinel]
        self._unlink(block)
        self._refs[block] = 1
        self.reached = max(self.reached, block + 1)
        return block

    def share(self, block: int) -> None:
        """Adds a holder; a free block is taken out of its list."""
        if self._refs[block] == 0:
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int, keep: EvictionClass = EvictionClass.NORMAL) -> None:
        """Removes a holder; a block without holders joins its class of free ones: NOT at the head, else at the tail."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} released twice"
        self._refs[block] = refs
        if refs == 0 and self.num_blocks <= block < self.size:
            self._take_offline(block)
        elif refs == 0:
            self._free(block, keep)

    def demote(self, block: int) -> None:
        """Makes a free block one that is allocated before others, as it has no name any more."""
        assert self._refs[block] == 0, f"block {block} is not free"
        self._unlink(block)
        self._free(block, EvictionClass.NOT)

    def is_offline(self, block: int) -> bool:
        """Whether the block has no memory."""
        return self._refs[block] == OFFLINE

    def by_worth(self) -> Iterator[int]:
        """Yields all blocks, those that `allocate` would take first before the others; held ones come last."""
        for sentinel in range(self.size, self.size + len(EvictionClass)):
            block = self._next[sentinel]
            while block != sentinel:
                yield block
                block = self._next[block]
        yield from (block for block in range(self.size) if self._refs[block] > 0)

    def check(self) -> None:
        """Asserts invariant I3 in full: O(size), for tests and simulation."""
        seen: set[int] = set()
        for sentinel in range(self.size, self.size + len(EvictionClass)):
            block = self._next[sentinel]
            while block != sentinel:
                assert block < self.num_blocks, f"free block {block} of {self.num_blocks}"
                assert block not in seen, f"block {block} twice in the free lists"
                assert self._refs[block] == 0, f"free block {block} has {self._refs[block]} references"
                assert self._prev[self._next[block]] == block, f"links of block {block} disagree"
                seen.add(block)
                block = self._next[block]
        assert len(seen) == self.num_free, f"{len(seen)} linked, {self.num_free} counted free"
        held = sum(1 for refs in self._refs if refs > 0) - 1  # the null block does not count
        offline = [block for block, refs in enumerate(self._refs) if refs == OFFLINE]
        assert len(offline) == self.num_offline, f"{len(offline)} offline, {self.num_offline} counted"
        assert all(block >= self.num_blocks for block in offline), "a block that may be used is offline"
        assert held + self.num_free + self.num_offline == self.size, "free + held + offline != total"

    def _take_offline(self, block: int) -> None:
        self._refs[block] = OFFLINE
        self.num_offline += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _free(self, block: int, keep: EvictionClass) -> None:
        sentinel = self.size + keep
        self._insert(block, self._next[sentinel] if keep is EvictionClass.NOT else sentinel)

    def _insert(self, block: int, after: int) -> None:
        """Links a block in front of another one, or of a sentinel: at its list's tail."""
        before = self._prev[after]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self.num_free += 1
