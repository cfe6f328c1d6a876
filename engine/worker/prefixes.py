"""Which rows of a decode step share a prefix of the cache: looked for when other rows run, not at each step.

Takes the slots of a step and the block tables that the host keeps. Knows no request.
"""

import numpy as np

from sluice_server.kernels.layout.prefixes import LEAST_SAVED, PrefixGroups, shared_prefixes
from sluice_server.kernels.layout.ragged import Tables


class SharedPrefixes:
    """Of the slots whose block tables these are: int32 [slots, blocks], kept up to date by whoever owns them."""

    def __init__(self, tables: Tables, block_size: int, least_saved: int = LEAST_SAVED) -> None:
        self._tables = tables
        self._block_size = block_size
        self._least_saved = least_saved
        self._slots: list[int] = []  # that the last look was at
        self._found: PrefixGroups | None = None

    def forget(self) -> None:
        """Somebody new has a slot."""
        self._slots = []

    def find(self, slots: list[int], starts: list[int]) -> PrefixGroups | None:
        """Of rows that compute one token each, at these positions. What is shared stays so as long as the same slots
        run: blocks are only added behind."""
        if self._slots != slots:
            at = np.array(starts, dtype=np.int64)
            self._found = shared_prefixes(self._tables[slots], at, self._block_size, self._least_saved)
            self._slots = list(slots)
        return self._found
