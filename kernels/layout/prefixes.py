"""Finds rows of a step that share a prefix of the cache, and decides whether attention reads it once for all of them.

This is cascade attention (Ye et al. 2024). Takes block tables and returns groups of rows. Equal leading blocks hold
equal keys. Pure: no tensors, no I/O.
"""

from typing import NamedTuple

import numpy as np

from sluice_server.kernels.layout.ragged import Longs, Tables

# A step handles shared prefixes separately if that saves reading at least this many keys, counted over all rows of one
# layer. With 8 kv heads of 128 in bfloat16 they are 32 MiB, 8 µs at an H200's 4 TB/s. The cost is one more launch and
# a merge of the parts. Derived, not measured.
LEAST_SAVED = 8192
MOST_GROUPS = 8  # of a step: a recorded step always has this number, some of them empty


class PrefixGroups(NamedTuple):
    """Rows of a step in groups that share a prefix.

    Attributes:
        order: all rows: those of the first group, of the second, …, then the rows that share nothing.
        sizes: number of rows of each group, at least 2.
        lengths: number of keys of each group's prefix, in whole blocks.
    """

    order: list[int]
    sizes: list[int]
    lengths: list[int]


class _Group(NamedTuple):
    rows: Longs
    num_blocks: int

    @property
    def saved(self) -> int:
        """Number of blocks that are not read again."""
        return (len(self.rows) - 1) * self.num_blocks


def shared_prefixes(
    tables: Tables, starts: Longs, block_size: int, least_saved: int = LEAST_SAVED
) -> PrefixGroups | None:
    """Returns the groups that save most, or None if together they save less than `least_saved` keys.

    Args:
        tables: int32 [rows, blocks]. Entries beyond a row's own blocks are ignored.
        starts: int64 [rows], position of the one token of each row; the whole blocks before it may be shared.
    """
    if len(np.unique(tables[:, 0])) == len(tables):
        return None  # the most common case, found by the cheapest check
    found = sorted(_split(tables, starts // block_size, np.arange(len(tables)), 0), key=lambda one: -one.saved)
    groups = found[:MOST_GROUPS]
    if sum(group.saved for group in groups) * block_size < least_saved:
        return None
    sharing = [int(row) for group in groups for row in group.rows]
    others = sorted(set(range(len(tables))).difference(sharing))
    lengths = [group.num_blocks * block_size for group in groups]
    return PrefixGroups([*sharing, *others], [len(group.rows) for group in groups], lengths)


def _split(tables: Tables, whole: Longs, rows: Longs, column: int) -> list[_Group]:
    """Groups rows that share all blocks before `column` by their block in that column."""
    rows = rows[whole[rows] > column]
    blocks, members = np.unique(tables[rows, column], return_inverse=True)
    groups = []
    for i in range(len(blocks)):
        own = rows[members == i]
        if len(own) > 1:
            groups += _best(tables, whole, own, column)
    return groups


def _best(tables: Tables, whole: Longs, rows: Longs, column: int) -> list[_Group]:
    """Returns rows that share the blocks up to `column` as one group, or as smaller groups if these save more.

    The smaller groups begin where the rows' blocks first differ.
    """
    most = int(whole[rows].min())
    differs = (tables[rows[1:], column:most] != tables[rows[0], column:most]).any(axis=0)
    end = column + int(differs.argmax()) if differs.any() else most
    together = _Group(rows, end)
    apart = _split(tables, whole, rows, end) if end < tables.shape[1] else []
    return apart if sum(group.saved for group in apart) > together.saved else [together]
