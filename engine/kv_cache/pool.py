"""The block pool: reference counts and doubly linked free lists over flat arrays, every operation O(1).

    0 ──────────── num_blocks
    │ held: refs > 0 │ free: refs == 0, in one list for each `EvictionClass`, from least to most recently released │

A free block may still be named by the prefix index (reclaimable). Sharing it again takes it out of the middle of its
list, hence the double links. Blocks least worth keeping are allocated first. Behind the last block lies the null block,
which is never free and never written: it replaces blocks that no step reads any more. Pure: block ids only, no tokens,
hashes or requests.
"""

import enum
from array import array
from collections.abc import Iterator


class EvictionClass(enum.IntEnum):
    """How much a free block is worth keeping: `allocate` takes the lowest class first, and the oldest block of it."""

    NOT = 0  # has no name, so it cannot be shared again
    NORMAL = 1
    LONG = 2  # left by a request of high priority


class BlockPool:
    """Owns the ids 0 … num_blocks-1. Invariant: `free + held = total`; `check()` asserts it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.reached = 0  # blocks that were ever in use: the first ones, as `allocate` takes unused ones in order
        self._refs: array[int] = array("i", [0]) * num_blocks
        self._refs.append(1)  # the null block's own
        # Index num_blocks + keep is the sentinel of a ring: its next is the list's head, its prev the tail.
        sentinels = range(num_blocks, num_blocks + len(EvictionClass))
        self._next: array[int] = array("i", [*range(1, num_blocks + 1), *sentinels])
        self._prev: array[int] = array("i", [num_blocks, *range(num_blocks), *sentinels[1:]])
        self._next[num_blocks], self._prev[num_blocks] = 0, num_blocks - 1  # all are in the first list

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one holder."""
        return self.num_blocks - self.num_free

    @property
    def null(self) -> int:
        """The null block, which replaces freed blocks in a table."""
        return self.num_blocks

    def refs(self, block: int) -> int:
        """Returns the number of tables that hold `block`."""
        return self._refs[block]

    def allocate(self) -> int:
        """Takes the free block least worth keeping, with one reference. The caller has checked `num_free`."""
        assert self.num_free > 0, "allocate from an empty pool"
        sentinel = self.num_blocks
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
        """Removes a holder; without holders the block goes to the tail of the free list for `keep`."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} released twice"
        self._refs[block] = refs
        if refs == 0:
            self._append(block, self.num_blocks + keep)

    def by_worth(self) -> Iterator[int]:
        """Yields all blocks, those that `allocate` would take first before the others; held ones come last."""
        for sentinel in range(self.num_blocks, self.num_blocks + len(EvictionClass)):
            block = self._next[sentinel]
            while block != sentinel:
                yield block
                block = self._next[block]
        yield from (block for block in range(self.num_blocks) if self._refs[block] > 0)

    def check(self) -> None:
        """Asserts invariant I3 in full: O(num_blocks), for tests and simulation."""
        seen: set[int] = set()
        for sentinel in range(self.num_blocks, self.num_blocks + len(EvictionClass)):
            block = self._next[sentinel]
            while block != sentinel:
                assert block not in seen, f"block {block} twice in the free lists"
                assert self._refs[block] == 0, f"free block {block} has {self._refs[block]} references"
                assert self._prev[self._next[block]] == block, f"links of block {block} disagree"
                seen.add(block)
                block = self._next[block]
        assert len(seen) == self.num_free, f"{len(seen)} linked, {self.num_free} counted free"
        held = sum(1 for refs in self._refs if refs > 0) - 1  # the null block does not count
        assert held + self.num_free == self.num_blocks, "free + held != total"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _append(self, block: int, sentinel: int) -> None:
        tail = self._prev[sentinel]
        self._next[tail] = block
        self._prev[block] = tail
        self._next[block] = sentinel
        self._prev[sentinel] = block
        self.num_free += 1
