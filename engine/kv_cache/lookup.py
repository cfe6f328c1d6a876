"""The lookup of prefixes: which leading blocks of a sequence every group of layers has cached. Changes nothing."""

from collections.abc import Iterable, Sequence

from sluice_server.engine.kv_cache.prefix import PrefixIndex, name_in
from sluice_server.engine.kv_cache.sizes import CacheSizes
from sluice_server.engine.kv_cache.table import BlockTable, CachedPrefix


class PrefixLookup:
    """Finds prefixes in an index. `null` is the block that stands for those that a window has left behind."""

    def __init__(self, index: PrefixIndex, sizes: CacheSizes, null: int) -> None:
        self._index = index
        self._sizes = sizes
        self._null = null
        self._full = [group for group, window in enumerate(sizes.windows) if window is None] or [0]

    def longest(self, table: BlockTable, tokens: Sequence[int]) -> list[list[int]]:
        """Returns, by group, the leading blocks that all groups without a window have; none for those with one.

        At least one token is left to compute.
        """
        found: list[list[int]] = [[] for _ in self._sizes.windows]
        for i in range((len(tokens) - 1) // self._sizes.block_size):
            blocks = self._find(table, tokens, i, self._full)
            if blocks is None:
                break
            for group, block in zip(self._full, blocks, strict=True):
                found[group].append(block)
        return found

    def within_windows(self, table: BlockTable, tokens: Sequence[int], found: list[list[int]]) -> CachedPrefix:
        """Returns the longest part of what `longest` found whose windows are cached, too."""
        num, block_size = len(found[0]), self._sizes.block_size
        rest = range(len(self._full), len(self._sizes.windows))
        i = num
        while rest and i > min(self._sizes.num_passed(group, num * block_size) for group in rest):
            i -= 1
            if self._find(table, tokens, i, rest) is None:
                num = i
        for group in rest:
            first = self._sizes.num_passed(group, num * block_size)
            own = [self._find(table, tokens, at, (group,)) for at in range(first, num)]
            found[group] = [self._null] * first + [block for one in own if one is not None for block in one]
        return CachedPrefix(num, [blocks[:num] for blocks in found])

    def _find(self, table: BlockTable, tokens: Sequence[int], i: int, groups: Iterable[int]) -> list[int] | None:
        """Returns the i-th block of these groups as it is cached; None if one of them is not."""
        name, found = table.name(tokens, i, self._sizes.block_size), []
        for group in groups:
            block = self._index.find(name_in(name, group))
            if block is None:
                return None
            found.append(block)
        return found
