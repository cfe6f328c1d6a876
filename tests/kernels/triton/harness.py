"""Memory that reveals a kernel's errors: poisoned outputs between guard rows, NaN in blocks without an owner; and
the tolerance of a result against a float64 reference.

The interpreter runs programs in order and reads out of bounds without complaint, so only contents can tell.
Inputs are float16 or float32: it computes wrongly in bfloat16, which only a GPU's run covers. It also makes an integer
of a condition on a scalar that is combined with one on a vector (write the scalar as a vector), and halves some numbers
that it rounds to fp8.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

GUARD = 3  # rows before and behind an output
POISON = 0x7F  # of integers; floating point is poisoned with NaN
# Relative to the largest number of the result, as products of rounded inputs are summed in float32.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclasses.dataclass(frozen=True)
class Guarded:
    """An output that a kernel must fill and must not write beyond."""

    tensor: Tensor  # of the asked shape, contiguous
    whole: Tensor  # with the guard rows around it

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> "Guarded":
        """Poisoned memory of that shape between guard rows."""
        whole = poisoned((shape[0] + 2 * GUARD, *shape[1:]), dtype)
        return cls(whole[GUARD : GUARD + shape[0]], whole)

    def check(self) -> Tensor:
        """The written output; fails if something was written around it, or poison is left."""
        outside = torch.cat([self.whole[:GUARD], self.whole[-GUARD:]])
        assert is_poison(outside).all(), "written outside of the output"
        assert not is_poison(self.tensor).any(), f"{int(is_poison(self.tensor).sum())} numbers were never written"
        return self.tensor


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN, or of an unlikely integer."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(tuple(shape), math.nan, dtype=dtype)
    return torch.full(tuple(shape), POISON, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


def is_poison(x: Tensor) -> Tensor:
    """Which elements are still as `poisoned` made them."""
    if x.dtype.is_floating_point and x.dtype.itemsize > 1:
        return x.isnan()
    return (x.view(torch.uint8) if x.dtype.itemsize == 1 else x) == POISON


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """`got`, computed in `dtype`, is near `want` in float64, relative to the largest wanted number."""
    assert got.shape == want.shape
    error = (got.double() - want).abs().max().item() if want.numel() else 0.0
    limit = factor * TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    assert error <= limit, f"off by {error:.3g}, allowed {limit:.3g}"  # a NaN fails, too


@dataclasses.dataclass(frozen=True)
class Pages:
    """A paged cache whose blocks belong to rows in random order; the others are NaN.

    Attributes:
        cache: [num_blocks, block_size, 2, kv_heads, dim], a view with the kv heads outside of the offsets in memory.
        tables: int32 [rows, width].
    """

    cache: Tensor
    tables: Tensor
    contexts: list[int]

    @classmethod
    def of(
        cls, contexts: Sequence[int], block: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
    ) -> "Pages":
        """Random keys and values for `contexts` tokens of each row; the rest of their last block is NaN."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-context // block) for context in contexts]
        num = 2 * sum(widths) + 2
        blocks = rng.sample(range(num), sum(widths))
        tables = np.full((len(contexts), max(widths) + 2), num - 1, dtype=np.int32)
        memory = poisoned((num, 3, 2, kv_heads, block, dim), dtype)  # of three layers, ours being the second
        cache = memory[:, 1].permute(0, 3, 1, 2, 4)
        for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
            tables[row, :width] = [blocks.pop() for _ in range(width)]
            for i in range(width):
                rows = min(block, context - i * block)
                fresh = torch.randn(rows, 2, kv_heads, dim, generator=generator)
                cache[tables[row, i], :rows] = fresh.to(dtype)
        return cls(cache, torch.from_numpy(tables), list(contexts))

    def keys_values(self, row: int) -> Tensor:
        """The keys and values of a row, in order: [context, 2, kv_heads, dim]."""
        block = self.cache.shape[1]
        context = self.contexts[row]
        owned = self.tables[row, : -(-context // block)].long()
        return self.cache[owned].flatten(0, 1)[:context]


def caught(monkeypatch: pytest.MonkeyPatch, module: object) -> list[Guarded]:
    """Puts the outputs that a launcher makes with `torch.empty` into guarded, poisoned memory from here on."""
    made: list[Guarded] = []

    def empty(*shape: int | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes = [size for part in shape for size in (part if isinstance(part, tuple) else (part,))]
        made.append(Guarded.of(sizes, dtype))
        return made[-1].tensor

    monkeypatch.setattr(module, "torch", type("Torch", (), {**vars(torch), "empty": staticmethod(empty)}))
    return made


def in_one_order(a: NDArray[Any], b: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """`np.matmul` of a [M, K] and b [K, N] that sums every element in the same order: a BLAS may have another kernel
    for the last rows of a tile, which no GPU has."""
    a, b = a.astype(dtype), b.astype(dtype)
    summed = np.zeros((len(a), b.shape[1]), dtype)
    for k in range(len(b)):
        summed += a[:, k, None] * b[k]
    return summed
