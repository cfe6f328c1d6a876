"""Makes what is added to one packed linear from an adapter's parts, following what packing did to its weight.

Packing stacks projections by rows (queries, keys and values; gate and up), permutes rows of rotated heads, and may
multiply columns by the norm before the linear. So each part has the place of its projection, its B has its rows in
the order of the weight's, and x is multiplied by the norm. The numbers of A and B stay as they are in the file.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sluice_server.engine.adapters.files import LowRank
from sluice_server.kernels.formats.side_products import Side, SidePart, in_blocks, in_shards


def fold(
    parts: Sequence[tuple[str, int]],
    adapter: Mapping[str, LowRank],
    *,
    norm: Tensor | None = None,
    orders: Mapping[str, Tensor] | None = None,
    num_shards: int = 1,
) -> Side | None:
    """Returns what an adapter adds to the linear of the projections `parts` [(name, rows)], stacked by rows.

    Args:
        norm: float32 [K], the norm's weight if it is folded into the weight.
        orders: names of projections → order of their rows, as packing had them.
        num_shards: equal parts of the linear's inputs, which have a product of their own each.

    Returns None if the adapter changes none of them.
    """
    found, first = [], 0
    for name, rows in parts:
        one, order = adapter.get(name), (orders or {}).get(name)
        if one is not None:
            b = one.b if order is None else one.b[order]
            found.append(SidePart(in_shards(one.a, num_shards), in_blocks(b), one.scale, first, rows))
        first += rows
    return Side(tuple(found), norm, num_shards) if found else None
