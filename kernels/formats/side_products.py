"""Low-rank products beside packed linears: y += scale · (x · aᵀ) · bᵀ, for some rows of a step each.

`Side` is what is added to one linear, and `SidedLinear` a linear with such products of several adapters. Matrices stay
in the dtype of their file and are computed with in float32; beside a linear that rounds its rows of x to bfloat16,
those of bfloat16 meet rounded numbers as well. Rows without a product are multiplied as they are without `SidedLinear`,
bit for bit; no row depends on another if the linear's do not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sluice_server.kernels.cpu import low_rank, memory, native
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear
from sluice_server.kernels.formats.row_blocks import RowBlocks
from sluice_server.kernels.reference.elementwise import GATES, rms_norm

Rows: TypeAlias = Tensor  # int64, ascending: indices of rows of a step
BLOCK = 64  # rows of b side by side; as in kernels/cpu/low_rank_expand.h


@dataclasses.dataclass(frozen=True, eq=False)
class SidePart:
    """The product beside one projection of a linear.

    Attributes:
        a: [rank, K]; of several shards [shards, rank, K / shards].
        b: [rows · rank], see `in_blocks`.
        scale: of the product.
        first, rows: which rows of the linear's weight are the projection's.
    """

    a: Tensor
    b: Tensor
    scale: float
    first: int
    rows: int

    def times(self, x: Tensor) -> Tensor:
        """Returns the product [M, rows] of x [M, K], both float32, by torch."""
        return self._expand(self._shrink(x) * self.scale)

    @functools.cached_property
    def _shrink(self) -> RowBlocks:
        return RowBlocks(lambda x: torch.mm(x, self.a.float().t()), self.a.shape[1], torch.float32)

    @functools.cached_property
    def _expand(self) -> RowBlocks:
        rank = len(self.a)
        return RowBlocks(lambda low: torch.mm(low, _expanding(self.b, self.rows, rank).float()), rank, torch.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """The products beside a packed linear, of which x is what the linear's own product has.

    Attributes:
        norm: float32 [K], by which x is multiplied, as the linear's weight has it folded in; None without.
        num_shards: equal parts of the linear's inputs, with a product each; see `shards`.
    """

    parts: tuple[SidePart, ...]
    norm: Tensor | None = None
    num_shards: int = 1

    @functools.cached_property
    def shards(self) -> Sequence["Side"]:
        """The products of each shard, whose sum is the whole product."""
        if self.num_shards == 1:
            return (self,)
        assert self.norm is None, "inputs that ranks share out have no norm before them"
        return [
            Side(tuple(dataclasses.replace(one, a=one.a[at]) for one in self.parts)) for at in range(self.num_shards)
        ]

    @functools.cached_property
    def numbers(self) -> Tensor:
        """The description for the C++ kernels; of several shards an empty one, as each has its own."""
        if self.num_shards > 1:
            return Side(()).numbers
        parts = [(one.a, one.b, one.first, one.rows, one.scale) for one in self.parts]
        return low_rank.numbers_of(self.norm, parts)

    def add_to(self, y: Tensor, x: Tensor, form: int = native.FLOAT32) -> Tensor:
        """Adds the products for x [M, K] to y [M, N] in place and returns it. `form`: see `low_rank.add_to`."""
        if low_rank.takes(y, x):
            low_rank.add_to(y, x.contiguous(), self.numbers, form)
            return y
        x = x.float() if self.norm is None else x.float() * self.norm
        for one in self.parts:
            y[:, one.first : one.first + one.rows] += one.times(x)
        return y


def in_shards(a: Tensor, num: int) -> Tensor:
    """Returns a [rank, K] as that of so many shards: [num, rank, K / num]; as it is for one."""
    return a if num == 1 else a.view(len(a), num, -1).transpose(0, 1).contiguous()


def in_blocks(b: Tensor) -> Tensor:
    """Returns b [rows, rank] with BLOCK rows side by side, one rank behind the other: [rows · rank]. The last block has
    the rows that are left."""
    whole = len(b) // BLOCK * BLOCK
    blocks = b[:whole].view(-1, BLOCK, b.shape[1]).transpose(1, 2)
    return torch.cat([blocks.reshape(-1), b[whole:].t().reshape(-1)])


def _expanding(blocks: Tensor, rows: int, rank: int) -> Tensor:
    """Returns the transposed matrix [rank, rows] of `in_blocks`."""
    whole = rows // BLOCK * BLOCK
    first, rest = blocks[: whole * rank], blocks[whole * rank :]
    return torch.cat([first.view(-1, rank, BLOCK).transpose(0, 1).reshape(rank, whole), rest.view(rank, -1)], 1)


def together(sides: Iterable[Side | None], rest: Callable[[], None] = memory.no_rest) -> list[Side | None]:
    """Returns sides whose matrices are copied into one memory, in the order in which they are read. `rest` is called
    between copies."""
    before = list(sides)
    halves = [
        half for side in before if side for half in (*(one.a for one in side.parts), *(one.b for one in side.parts))
    ]
    flat = [one.reshape(-1) for one in halves]
    copies = iter(memory.side_by_side(flat, memory.LINE, memory.in_small_pages, rest))
    return [_moved(side, copies) if side else None for side in before]


def _moved(side: Side, copies: Iterator[Tensor]) -> Side:
    a = [next(copies).view(one.a.shape) for one in side.parts]
    parts = (dataclasses.replace(one, a=own, b=next(copies)) for one, own in zip(side.parts, a, strict=True))
    return Side(tuple(parts), side.norm, side.num_shards)


def bytes_of(sides: Iterable[Side | None]) -> int:
    """Returns the bytes that the matrices of `together` take."""
    parts = (one for side in sides if side is not None for one in side.parts)
    return sum(-(-half.nbytes // memory.LINE) * memory.LINE for one in parts for half in (one.a, one.b))


class SidedLinear(PackedLinear):
    """A packed linear of one step, with products beside it for groups of the step's rows."""

    def __init__(self, linear: PackedLinear, sides: Sequence[tuple[Rows, Side]]) -> None:
        """`sides`: products, each with the rows that it is for; no row has two."""
        self._linear = linear
        self._sides = sides
        self.weight, self.bias, self.kernel = linear.weight, linear.bias, linear.kernel
        self.features, self.dtype = linear.features, linear.dtype
        self.batch_invariant = linear.batch_invariant
        self._form = linear.arguments[0] if isinstance(linear, NativeLinear) else native.FLOAT32

    def apply(self, x: Tensor) -> Tensor:
        y = self._linear.apply(x)
        for rows, side in self._sides:
            y[rows] = side.add_to(y[rows], x[rows], self._form)
        return y

    def store_in(self, y: Tensor, x: Tensor) -> None:
        self._linear.store_in(y, x)
        for rows, side in self._sides:
            y[rows] = side.add_to(y[rows], x[rows], self._form)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        self._linear.add_to(residual, x)
        for rows, side in self._sides:
            residual[rows] = side.add_to(residual[rows], x[rows], self._form)
        return residual

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        y = self._linear.apply_normed(x, norm, eps)
        for rows, side in self._sides:
            y[rows] = side.add_to(y[rows], rms_norm(x[rows], norm, eps), self._form)
        return y

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        y = x.new_empty(len(x), self.features // 2)
        plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for rows, side in self._sides:
            plain[rows] = False
            own = x[rows]
            halves = side.add_to(self._linear.halves(own, norm, eps), rms_norm(own, norm, eps), self._form)
            y[rows] = GATES[activation](halves).to(y.dtype)
        if plain.any():
            y[plain] = self._linear.apply_gated(x[plain], norm, eps, activation).to(y.dtype)
        return y
