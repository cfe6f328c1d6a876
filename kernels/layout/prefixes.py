"""Which rows of a step share how long a prefix of the cache, and whether it is worth looking at it once for all of them
(cascade attention, Ye et al. 2024).

Takes block tables, gives groups of rows: equal leading blocks are equal keys. Knows no tensor and no request.
"""

from typing import NamedTuple

import numpy as np

from sluice_server.kernels.layout.ragged import Longs, Tables

# Keys that need not be read again, of all rows and a layer, from which a step takes prefixes apart. At 8 kv heads of
# 128 in bfloat16 they are 32 MiB, 8 µs of an H200's 4 TB/s; what it costs is a launch more, and parts that are merged.
# Derived, not measured.
LEAST_SAVED = 8192
MOST_GROUPS = 8  # of a step: a recorded one has so many, whether they are there or not


class PrefixGroups(NamedTuple):
    """Attributes:
    order: of all rows: those of the first group, of the second, …, and those that share nothing.
    sizes: rows of each group, 2 or more.
    lengths: keys of each group's prefix, whole blocks.
    """

    order: list[int]
    sizes: list[int]
    lengths: list[int]


class _Group(NamedTuple):
    rows: Longs
    num_blocks: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.rows) - 1) * self.num_blocks


def shared_prefixes(
    tables: Tables, starts: Longs, block_size: int, least_saved: int = LEAST_SAVED
) -> PrefixGroups | None:
    """The groups that save most, or None where they save less than `least_saved` keys.

    Args:
        tables: int32 [rows, blocks]. What is behind a row's own blocks means nothing.
        starts: int64 [rows], position of the one token of each row: whole blocks before it may be shared.
    """
    if len(np.unique(tables[:, 0])) == len(tables):
        return None  # the common step, and the cheapest look at it
    found = sorted(_split(tables, starts // block_size, np.arange(len(tables)), 0), key=lambda one: -one.saved)
    groups = found[:MOST_GROUPS]
    if sum(group.saved for group in groups) * block_size < least_saved:
        return None
    sharing = [int(row) for group in groups for row in group.rows]
    others = sorted(set(range(len(tables))).difference(sharing))
    lengths = [group.num_blocks * block_size for group in groups]
    return PrefixGroups([*sharing, *others], [len(group.rows) for group in groups], lengths)


def _split(tables: Tables, whole: Longs, rows: Longs, column: int) -> list[_Group]:
    """Groups among rows which share the blocks before `column`: by the block that each has there."""
    rows = rows[whole[rows] > column]
    blocks, members = np.unique(tables[rows, column], return_inverse=True)
    groups = []
    for i in range(len(blocks)):
        own = rows[members == i]
        if len(own) > 1:
            groups += _best(tables, whole, own, column)
    return groups


def _best(tables: Tables, whole: Longs, rows: Longs, column: int) -> list[_Group]:
    """Rows which share the blocks up to `column`, as one group, or as those that are left where they part."""
    most = int(whole[rows].min())
    differs = (tables[rows[1:], column:most] != tables[rows[0], column:most]).any(axis=0)
    end = column + int(differs.argmax()) if differs.any() else most
    together = _Group(rows, end)
    apart = _split(tables, whole, rows, end) if end < tables.shape[1] else []
    return apart if sum(group.saved for group in apart) > together.saved else [together]
