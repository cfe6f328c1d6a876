"""Divides a model's layers into groups of equal size, so that all of them can share one pool of blocks.

Layers with a sliding window need the blocks of the last tokens only, and layers without need all. A block therefore
holds the keys and values of `size` layers, and each group has a block table of its own. Blocks behind a window are
given back and may serve any group. Design: vLLM's hybrid KV cache. Pure: numbers of layers and windows.
"""

import dataclasses
from collections.abc import Sequence

MAX_WASTE = 0.1  # share of a block that may stay unused, as groups are filled up to one size


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers with the same window.

    Attributes:
        windows: the window of each group in tokens; None for full attention. Groups of full attention come first.
        size: layers whose keys and values a block holds.
        group_of: group of each layer.
        place_of: place of each layer within the blocks of its group, below `size`.
    """

    windows: tuple[int | None, ...]
    size: int
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]

    @property
    def num(self) -> int:
        """Number of groups."""
        return len(self.windows)

    def of_layers(self, layers: range) -> "LayerGroups":
        """Returns the same groups with consecutive layers alone: a rank that has only these holds no others' keys.

        Layers of one window are dealt out to the groups of that window, so that blocks are as small as may be.
        """
        if len(layers) == len(self.group_of):
            return self
        group_of, place_of = [], []
        dealt: dict[int | None, int] = {}
        for layer in layers:
            window = self.windows[self.group_of[layer]]
            groups = [group for group, its in enumerate(self.windows) if its == window]
            place, at = divmod(dealt.get(window, 0), len(groups))
            dealt[window] = dealt.get(window, 0) + 1
            group_of.append(groups[at])
            place_of.append(place)
        return LayerGroups(self.windows, 1 + max(place_of), tuple(group_of), tuple(place_of))


def one_group(windows: Sequence[int | None]) -> LayerGroups:
    """Returns a single group of all layers; its window is the longest, or None if any layer has full attention."""
    sizes = [size for size in windows if size is not None]
    window = max(sizes) if len(sizes) == len(windows) else None
    return LayerGroups((window,), len(windows), (0,) * len(windows), tuple(range(len(windows))))


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Returns the groups for layers with these windows (None: full attention); see `LayerGroups`.

    The size is the largest that wastes at most `MAX_WASTE` of a block on average.
    """
    kinds = sorted(set(windows), key=lambda size: (size is not None, size or 0))
    if len(kinds) < 2:
        return one_group(windows)
    counts = [list(windows).count(kind) for kind in kinds]
    size = next(size for size in range(min(counts), 0, -1) if _waste(counts, size) <= MAX_WASTE)
    found: list[int | None] = []
    group_of, place_of = [0] * len(windows), [0] * len(windows)
    for kind in kinds:
        first = len(found)
        for at, layer in enumerate(layer for layer, own in enumerate(windows) if own == kind):
            group_of[layer], place_of[layer] = first + at // size, at % size
        found += [kind] * -(-list(windows).count(kind) // size)
    return LayerGroups(tuple(found), size, tuple(group_of), tuple(place_of))


def _waste(counts: Sequence[int], size: int) -> float:
    """Returns the share of memory that stays unused with groups of `size` layers."""
    used, taken = sum(counts), sum(-(-num // size) * size for num in counts)
    return 1 - used / taken
