"""The assembly that widens integers gives every integer exactly: computed here instruction by instruction, as there is
no GPU; and what is computed instead where kernels are interpreted."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sluice_server.kernels.triton import widen

Words = NDArray[np.uint32]
HALVES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """`prmt.b32`: the bytes of a and b that the selector's nibbles name."""
    both = np.stack([(one >> (8 * i)) & 0xFF for one in (a, b) for i in range(4)])
    chosen = [both[int(selector.flat[0]) >> (4 * i) & 7] << np.uint32(8 * i) for i in range(4)]
    found: Words = np.bitwise_or.reduce(np.stack(chosen)).astype(np.uint32)
    return found


def in_halves(kind: str, compute: Callable[..., torch.Tensor], *given: Words) -> Words:
    """An instruction on two numbers of half precision at once, rounded once."""
    wide = [torch.from_numpy(np.ascontiguousarray(one).view(np.int16)).view(HALVES[kind]).double() for one in given]
    return compute(*wide).to(HALVES[kind]).view(torch.int16).numpy().view(np.uint32)


RULES: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shr.b32": np.right_shift,
    "shr.u32": np.right_shift,
    "prmt.b32": permuted,
    **{f"sub.{kind}": lambda a, b, kind=kind: in_halves(kind, torch.sub, a, b) for kind in HALVES},
    **{
        f"fma.rn.{kind}": lambda a, b, c, kind=kind: in_halves(kind, lambda x, y, z: x * y + z, a, b, c)
        for kind in HALVES
    },
}


def run(code: str, *given: Words) -> tuple[Words, Words]:
    """What the code leaves in $0 and $1; $2 and so on are given."""
    values = {f"${i}": one for i, one in enumerate(given, 2)}
    for name, rest in re.findall(r"^([a-z][\w.]*) (.*);$", code, re.M):
        target, *sources = rest.split(", ")
        words = [
            values.get(one, np.full(len(given[0]), int(one, 0) if one[0].isdigit() else 0, np.uint32))
            for one in sources
        ]
        values[target] = RULES[name](*words)
    return values["$0"], values["$1"]


def four(found: tuple[Words, Words], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of two registers of each thread, in order: [threads, 4]."""
    pairs = np.stack(found, axis=1)
    return torch.from_numpy(pairs.view(np.int16)).view(dtype).float()


@pytest.mark.parametrize(
    ("code", "dtype"), [(widen.INT8_TO_FLOAT16, torch.float16), (widen.INT8_TO_BFLOAT16, torch.bfloat16)]
)
def test_every_int8(code: object, dtype: torch.dtype) -> None:
    numbers = torch.arange(-128, 128, dtype=torch.int8)
    rows = torch.stack([numbers.roll(i) for i in range(4)], dim=1).contiguous()
    words = rows.numpy().view(np.uint32).reshape(-1)
    assert torch.equal(four(run(code.value, words), dtype), rows.float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_upper", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "base"), [("FLOAT16", torch.float16, 1024), ("BFLOAT16", torch.bfloat16, 128)]
)
def test_every_nibble_less_every_zero_point(is_upper: bool, kind: str, dtype: torch.dtype, base: int) -> None:
    code = getattr(widen, f"{'UPPER' if is_upper else 'LOWER'}_TO_{kind}").value
    rows = torch.stack([torch.arange(256).roll(i).to(torch.uint8) for i in range(4)], dim=1).contiguous()
    words = rows.numpy().view(np.uint32).reshape(-1)
    own = (rows >> 4 if is_upper else rows & 15).float()
    for zero in range(16):
        added = torch.full((256, 2), -float(base + zero), dtype=dtype).view(torch.int16).numpy().view(np.uint32)
        assert torch.equal(four(run(code, words, added[:, 0], added[:, 0]), dtype), own - zero)
