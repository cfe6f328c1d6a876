"""Folds an adapter's parts into what is added to one packed linear, following what packing did to its weight.

Packing stacks projections by rows (queries, keys and values; gate and up), permutes rows of rotated heads, and may
multiply columns by the norm before the linear. So A matrices are stacked and take the norm, and each B keeps its rows,
in the order of the weight's, and the columns of its own A; everything else is zero.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.adapters.files import LowRank
from sluice_server.kernels.formats.side_products import Side


def fold(
    parts: Sequence[tuple[str, int]],
    adapter: Mapping[str, LowRank],
    *,
    norm: Tensor | None = None,
    orders: Mapping[str, Tensor] | None = None,
) -> Side | None:
    """Returns what an adapter adds to the linear of the projections `parts` [(name, rows)], stacked by rows.

    Args:
        norm: [K], the norm's weight if it is folded into the weight.
        orders: names of projections → order of their rows, as packing had them.

    Returns None if the adapter changes none of them.
    """
    found = [(adapter.get(name), rows, (orders or {}).get(name)) for name, rows in parts]
    changed = [one for one, _, _ in found if one is not None]
    if not changed:
        return None
    a = torch.cat([one.a.float() for one in changed])
    b = torch.zeros(sum(rows for _, rows in parts), len(a))
    row = column = 0
    for one, rows, order in found:
        if one is not None:
            own = one.b.float() * one.scale
            rank = own.shape[1]
            b[row : row + rows, column : column + rank] = own if order is None else own[order]
            column += rank
        row += rows
    return Side(a if norm is None else a * norm.float(), b)
