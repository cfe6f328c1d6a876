"""The assembly that widens numbers gives every one exactly: computed here instruction by instruction, as there is
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
    "lop3.b32": lambda a, b, c, table: a & b | c if int(table.flat[0]) == 0xEA else (a & b) ^ c,
    "shr.b32": np.right_shift,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "prmt.b32": permuted,
    "cvt.u16.u32": lambda a: a & np.uint32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": lambda a: (
        torch.from_numpy(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4)[:, :2].copy())
        .view(torch.float8_e4m3fn)
        .to(torch.float16)
        .view(torch.int16)
        .numpy()
        .view(np.uint32)[:, 0]
    ),
    **{f"sub.{kind}": lambda a, b, kind=kind: in_halves(kind, torch.sub, a, b) for kind in HALVES},
    **{
        f"fma.rn.{kind}": lambda a, b, c, kind=kind: in_halves(kind, lambda x, y, z: x * y + z, a, b, c)
        for kind in HALVES
    },
}


def run(code: str, *given: Words, num: int = 2) -> tuple[Words, ...]:
    """What the code leaves in its first `num` operands; the others are given."""
    values = {f"${i}": one for i, one in enumerate(given, num)}
    for name, rest in re.findall(r"^([a-z][\w.]*) (.*);$", code, re.M):
        target, *sources = rest.split(", ")
        words = [
            values.get(one, np.full(len(given[0]), int(one, 0) if one[0].isdigit() else 0, np.uint32))
            for one in sources
        ]
        values[target] = RULES[name](*words)
    return tuple(values[f"${i}"] for i in range(num))


def numbers(found: tuple[Words, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the registers of each thread, in order: [threads, 2 · registers]."""
    pairs = np.stack(found, axis=1)
    return torch.from_numpy(pairs.view(np.int16)).view(dtype).float()


@pytest.mark.parametrize(
    ("code", "dtype"), [(widen.INT8_TO_FLOAT16, torch.float16), (widen.INT8_TO_BFLOAT16, torch.bfloat16)]
)
def test_every_int8(code: object, dtype: torch.dtype) -> None:
    every = torch.arange(-128, 128, dtype=torch.int8)
    rows = torch.stack([every.roll(i) for i in range(4)], dim=1).contiguous()
    words = rows.numpy().view(np.uint32).reshape(-1)
    assert torch.equal(numbers(run(code.value, words), dtype), rows.float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["LOWER", "UPPER"])
@pytest.mark.parametrize(("kind", "dtype"), [("FLOAT16", torch.float16), ("BFLOAT16", torch.bfloat16)])
def test_every_int8_of_a_word(place: str, kind: str, dtype: torch.dtype) -> None:
    code = getattr(widen, f"{place}_TO_{kind}").value
    every = torch.arange(-128, 128, dtype=torch.int8)
    rows = torch.stack([every.roll(i) for i in range(4)], dim=1).contiguous()
    words = rows.numpy().view(np.uint32).reshape(-1)
    assert torch.equal(numbers(run(code, words, num=1), dtype), rows[:, int(place == "UPPER") :: 2].float())


@pytest.mark.parametrize("place", ["LOWER", "UPPER"])
def test_every_float8_of_a_word(place: str) -> None:
    every = torch.arange(256).to(torch.uint8)
    rows = torch.stack([every.roll(i) for i in range(4)], dim=1).contiguous()
    found = run(getattr(widen, f"{place}_FLOAT8_TO_FLOAT16").value, rows.numpy().view(np.uint32).reshape(-1), num=1)
    wanted = rows.view(torch.float8_e4m3fn).float()[:, int(place == "UPPER") :: 2]
    assert torch.equal(numbers(found, torch.float16).nan_to_num(-1.0), wanted.nan_to_num(-1.0))


@pytest.mark.parametrize("plane", range(4))
@pytest.mark.parametrize(("kind", "dtype"), [("FLOAT16", torch.float16), ("BFLOAT16", torch.bfloat16)])
def test_every_number_of_4_bits_less_every_zero_point(plane: int, kind: str, dtype: torch.dtype) -> None:
    code = getattr(widen, f"PLANE_{plane}_TO_{kind}").value
    rows = torch.stack([torch.arange(1 << 16), torch.arange(1 << 16).roll(4321)], dim=1).to(torch.int16)
    words, own = rows.numpy().view(np.uint32).reshape(-1), (rows.int() >> 4 * plane & 15).float()
    base = 16 if kind == "BFLOAT16" else 64
    for zero in np.arange(129) / 8:
        added = torch.full((len(words), 2), -float(base + zero), dtype=dtype).view(torch.int16).numpy().view(np.uint32)
        assert torch.equal(numbers(run(code, words, added[:, 0], num=1), dtype), own - zero)
