"""How many blocks sequences take in each group of layers, and how many a window leaves behind. Pure arithmetic."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a group of layers: `size` tokens, computed in chunks up to `max_chunk`."""

    size: int
    max_chunk: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSizes:
    """Blocks of `block_size` tokens in groups of layers with these windows; None: the group sees all tokens."""

    block_size: int
    windows: tuple[Window | None, ...]

    @property
    def have_windows(self) -> bool:
        """Whether a window leaves blocks behind in some group."""
        return any(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks that `num_tokens` tokens take in each group."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, num_sequences: int = 1, num_shared: int = 0) -> int:
        """Returns the most blocks that all groups hold while so many sequences grow to `num_tokens` each.

        `num_shared`: blocks of each group that they share, except where a window bounds what they hold.
        """
        return self._bounded(num_shared + num_sequences * (self.blocks_for(num_tokens) - num_shared), num_sequences)

    def blocks_within(self, num_tokens: int, num_sequences: int) -> int:
        """Returns the most blocks that all groups hold for so many sequences with `num_tokens` together."""
        return self._bounded(self.blocks_for(num_tokens), num_sequences)

    def most_within(self, window: Window | None, num_blocks: int, num_sequences: int = 1) -> int:
        """Returns how many of `num_blocks` blocks so many sequences hold at most in a group."""
        if window is None:
            return num_blocks
        return min(num_blocks, num_sequences * (self.blocks_for(window.size + window.max_chunk) + 1))

    def num_passed(self, group: int, num_computed: int) -> int:
        """Returns the number of leading full blocks of a group that no token from `num_computed` on reads."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, num_computed - window.size + 1) // self.block_size

    def _bounded(self, num_blocks: int, num_sequences: int) -> int:
        return sum(self.most_within(window, num_blocks, num_sequences) for window in self.windows)
