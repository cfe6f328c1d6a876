"""The block pool: reference counts and a doubly linked free list over flat arrays, every operation O(1).

    0 ──────────── num_blocks
    │ held: refs > 0 │ free: refs == 0, linked from least to most recently released │

A free block may still be named by the prefix index (reclaimable): sharing it again takes it out of the middle of the
list, which is why the list is doubly linked. Knows block ids; nothing of tokens, hashes or requests.
"""

from array import array


class BlockPool:
    """Owns the ids 0 … num_blocks-1. `free + held = total` at all times; `check()` says so."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refs: array[int] = array("i", [0]) * num_blocks
        # Index num_blocks is the sentinel of the ring: its next is the list's head, its prev the tail.
        self._next: array[int] = array("i", [*range(1, num_blocks + 1), 0])
        self._prev: array[int] = array("i", [num_blocks, *range(num_blocks)])

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free

    def refs(self, block: int) -> int:
        """How many tables hold `block`."""
        return self._refs[block]

    def allocate(self) -> int:
        """Take the least recently released free block, with one reference. The caller has checked `num_free`."""
        block = self._next[self.num_blocks]
        assert self.num_free > 0, "allocate from an empty pool"
        self._unlink(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder; a free block is taken back from the list."""
        if self._refs[block] == 0:
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one sends the block to the tail of the free list."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} released twice"
        self._refs[block] = refs
        if refs == 0:
            self._append(block)

    def check(self) -> None:
        """Assert I3 in full: O(num_blocks), for tests and simulation."""
        seen: set[int] = set()
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            assert block not in seen, f"block {block} twice in the free list"
            assert self._refs[block] == 0, f"free block {block} has {self._refs[block]} references"
            assert self._prev[self._next[block]] == block, f"links of block {block} disagree"
            seen.add(block)
            block = self._next[block]
        assert len(seen) == self.num_free, f"{len(seen)} linked, {self.num_free} counted free"
        held = sum(1 for refs in self._refs if refs > 0)
        assert held + self.num_free == self.num_blocks, "free + held != total"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _append(self, block: int) -> None:
        tail = self._prev[self.num_blocks]
        self._next[tail] = block
        self._prev[block] = tail
        self._next[block] = self.num_blocks
        self._prev[self.num_blocks] = block
        self.num_free += 1
