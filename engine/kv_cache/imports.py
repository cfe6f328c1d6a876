"""Fills blocks of a cache from elsewhere: they are held in quarantine, and get their names when they are complete.

No prefix is ever found in a block in quarantine. What does not arrive is computed like any other token. Pure: no bytes,
no clock.
"""

from collections.abc import Container, Sequence

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.log import NamedBlock
from sluice_server.engine.kv_cache.pool import EvictionClass
from sluice_server.engine.kv_cache.prefix import name_in, names_of


class PrefixImport:
    """The import of one sequence's full blocks into a cache. `end` it in any case, before the next step."""

    def __init__(self, cache: KVCache, root: bytes, tokens: Sequence[int]) -> None:
        """`root`: the start of the chain of names."""
        self._cache = cache
        self._root = root
        self._tokens = tokens
        self._num = (len(tokens) - 1) // cache.block_size  # the last token is computed in any case
        self._names = names_of(root, tokens[: self._num * cache.block_size], cache.block_size)
        self._place_of = {name: i for i, name in enumerate(self._names)}
        self._kept: list[int] = []  # found or completed, and held, so that no later one takes their place
        self._quarantine: dict[int, bytes] = {}
        self.num_completed = 0

    def lacking(self) -> list[bytes]:
        """Returns the names of all blocks that the cache lacks, in every group of layers."""
        groups = range(self._cache.num_groups)
        names = [name_in(name, group) for name in self._names for group in groups]
        return [name for name in names if self._cache.index.find(name) is None]

    def wanted(self, offered: Container[bytes]) -> list[bytes]:
        """Returns what to fetch of the names that are offered, the start of the prefix first: up to the first block
        that is neither there nor offered, and in groups with a window the last blocks before that only. Holds the
        blocks that are there."""
        sizes, index = self._cache.sizes, self._cache.index
        full = [group for group, window in enumerate(sizes.windows) if window is None] or [0]
        num = 0
        while num < self._num and all(
            (name := name_in(self._names[num], group)) in offered or index.find(name) is not None for group in full
        ):
            num += 1
        first = [
            0 if group in full else sizes.num_passed(group, num * sizes.block_size)
            for group in range(self._cache.num_groups)
        ]
        names = [name_in(self._names[i], group) for i in range(num) for group, at in enumerate(first) if i >= at]
        for name in names:
            block = index.find(name)
            if block is not None:
                self._hold(block)
        return [name for name in names if index.find(name) is None and name in offered]

    def take(self, name: bytes) -> int | None:
        """Returns a block to fill, which is in quarantine from now on; None if none is free. The cache's pending moves
        must run before it is filled."""
        if not self._cache.pool.num_free:
            return None
        block = self._cache.take_block()
        self._quarantine[block] = name
        return block

    def complete(self, block: int) -> None:
        """Ends the quarantine of a block that was filled, and gives it its name."""
        name = self._quarantine.pop(block)
        self._cache.name_block(name, block, self._logged(name))
        self._kept.append(block)
        self.num_completed += 1

    def end(self) -> None:
        """Lets all blocks go: what is complete can be found, and is reclaimed from its end on; the rest is free."""
        for block in self._quarantine:
            self._cache.pool.release(block, EvictionClass.NOT)
        for block in reversed(self._kept):
            self._cache.let_go(block, EvictionClass.NORMAL)
        self._quarantine, self._kept = {}, []

    def _hold(self, block: int) -> None:
        self._cache.pool.share(block)
        self._kept.append(block)

    def _logged(self, name: bytes) -> NamedBlock | None:
        """Returns a block as the log has it; None without a log, and for groups other than the first."""
        i, size = self._place_of.get(name, -1), self._cache.block_size
        if self._cache.index.log is None or i < 0:
            return None
        tokens = tuple(self._tokens[i * size : (i + 1) * size])
        return NamedBlock(name, self._names[i - 1] if i else self._root, self._root, tokens)
