"""Widens numbers of 8 and 4 bits to half precision on a CUDA device, several at once, integers without conversions.

Bits that are put behind the upper byte of a half-precision number are that number plus an integer: 0x64nn is 1024 + n
in float16, 0x43nn is 128 + n in bfloat16 where n has 7 bits. A difference leaves the integer, exactly. A conversion
takes four to sixteen times as long. The interpreter and AMD's GPUs, which have no such assembly, and other formats
convert.
"""

import torch
import triton
import triton.language as tl

from sluice_server.kernels.formats import planes

ZERO, ZERO_STEP = tl.constexpr(planes.ZERO), tl.constexpr(1 / planes.ZERO_STEPS)
CONVERTS = tl.constexpr(triton.knobs.runtime.interpret or torch.version.hip is not None)

# $0, $1: two pairs of numbers; $2: four int8. Adding 128 makes them unsigned, which the difference undoes.
INT8_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 bytes, low, high, less;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 low, bytes, 0x64646464, 0x4140;
prmt.b32 high, bytes, 0x64646464, 0x4342;
mov.b32 less, 0x64806480;
sub.f16x2 $0, low, less;
sub.f16x2 $1, high, less;
}""")
# The lower 7 bits plus 128, less 128 or, with the sign bit, 256.
INT8_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 low, high, sign, rest, minus;
prmt.b32 low, $2, 0x43434343, 0x4140;
prmt.b32 high, $2, 0x43434343, 0x4342;
mov.b32 minus, 0xbf80bf80;
and.b32 sign, low, 0xff80ff80;
and.b32 rest, low, 0xff7fff7f;
fma.rn.bf16x2 $0, sign, minus, rest;
and.b32 sign, high, 0xff80ff80;
and.b32 rest, high, 0xff7fff7f;
fma.rn.bf16x2 $1, sign, minus, rest;
}""")
# The lower bytes of two words, $1: the first instruction puts each behind 0x64 and adds 128, as above.
LOWER_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 both, magic, less;
mov.b32 magic, 0x64806480;
lop3.b32 both, $1, 0x00ff00ff, magic, 0x6a;
mov.b32 less, 0x64806480;
sub.f16x2 $0, both, less;
}""")
LOWER_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 rest, sign, magic, minus;
mov.b32 magic, 0x43004300;
lop3.b32 rest, $1, 0x007f007f, magic, 0xea;
lop3.b32 sign, $1, 0x00800080, magic, 0xea;
mov.b32 minus, 0xbf80bf80;
fma.rn.bf16x2 $0, sign, minus, rest;
}""")
UPPER_TO_FLOAT16, UPPER_TO_BFLOAT16 = (
    tl.constexpr(code.value.replace("$1", "upper").replace("{\n", "{\n.reg .b32 upper;\nshr.b32 upper, $1, 8;\n"))
    for code in (LOWER_TO_FLOAT16, LOWER_TO_BFLOAT16)
)
# The same bytes as float8: put side by side, then converted both at once.
LOWER_FLOAT8_TO_FLOAT16, UPPER_FLOAT8_TO_FLOAT16 = (
    tl.constexpr(f"""{{
.reg .b32 both;
.reg .b16 pair;
prmt.b32 both, $1, 0, {selector};
cvt.u16.u32 pair, both;
cvt.rn.f16x2.e4m3x2 $0, pair;
}}""")
    for selector in ("0x4420", "0x4431")
)
# A plane of 4-bit numbers of two words, $1: 64 or 16 plus each number, from which $2 leaves the number less its zero
# point. Where numbers of 16 bits are so large, their last place is an eighth or less, as the zero point's is.
PLANE = """{
.reg .b32 word, both, magic, factor;
SHIFT
mov.b32 magic, MAGIC;
lop3.b32 both, word, MASK, magic, 0xea;
mov.b32 factor, FACTOR;
fma.rn.KIND $0, both, factor, $2;
}"""


def _plane(bits: int, **parts: str) -> tl.constexpr:
    """Assembly for planes whose numbers are `bits` too low in their word; too high if negative."""
    shift = f"{'shl' if bits > 0 else 'shr'}.b32 word, $1, {abs(bits)};" if bits else "mov.b32 word, $1;"
    code = PLANE.replace("SHIFT", shift)
    for name, part in parts.items():
        code = code.replace(name, part)
    return tl.constexpr(code)


# 1024 plus 16 times the number, over 16.
_FLOAT16 = {"MASK": "0x00f000f0", "MAGIC": "0x64006400", "FACTOR": "0x2c002c00", "KIND": "f16x2"}
PLANE_0_TO_FLOAT16 = _plane(4, **_FLOAT16)
PLANE_1_TO_FLOAT16 = _plane(0, **_FLOAT16)
PLANE_2_TO_FLOAT16 = _plane(-4, **_FLOAT16)
PLANE_3_TO_FLOAT16 = _plane(-8, **_FLOAT16)
_BFLOAT16 = {"MASK": "0x00780078", "MAGIC": "0x41804180", "FACTOR": "0x3f803f80", "KIND": "bf16x2"}
PLANE_0_TO_BFLOAT16 = _plane(3, **_BFLOAT16)
PLANE_1_TO_BFLOAT16 = _plane(-1, **_BFLOAT16)
PLANE_2_TO_BFLOAT16 = _plane(-5, **_BFLOAT16)
PLANE_3_TO_BFLOAT16 = _plane(-9, **_BFLOAT16)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Returns x in another format; int8 in half precision by assembly."""
    if CONVERTS or x.dtype != tl.int8:
        return x.to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(INT8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_TO_BFLOAT16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@triton.jit
def plane8(words, dtype: tl.constexpr, PLANE: tl.constexpr):
    """Returns the int8 of a plane of words int16 [N, K] in another format; see `kernels.formats.planes`."""
    if CONVERTS or (dtype != tl.float16 and dtype != tl.bfloat16):
        return ((((words >> (8 * PLANE)) & 255) ^ 128) - 128).to(dtype)
    elif dtype == tl.float16:
        code: tl.constexpr = UPPER_TO_FLOAT16 if PLANE else LOWER_TO_FLOAT16
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        short: tl.constexpr = UPPER_TO_BFLOAT16 if PLANE else LOWER_TO_BFLOAT16
        return tl.inline_asm_elementwise(short, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def plane_float8(words, dtype: tl.constexpr, PLANE: tl.constexpr):
    """Returns the float8 (e4m3) of a plane of words int16 [N, K] in another format, as `plane8`."""
    if CONVERTS or dtype != tl.float16:
        return ((words >> (8 * PLANE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        code: tl.constexpr = UPPER_FLOAT8_TO_FLOAT16 if PLANE else LOWER_FLOAT8_TO_FLOAT16
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def plane4(words, zero, dtype: tl.constexpr, PLANE: tl.constexpr):
    """Returns the numbers of a plane of words int16 [N, K] less the zero points [N], eighths from 0 to 16.

    See `kernels.formats.planes`.
    """
    if CONVERTS or (dtype != tl.float16 and dtype != tl.bfloat16):
        return ((words >> (4 * PLANE)) & 15).to(dtype) - zero.to(dtype)[:, None]
    elif dtype == tl.float16:
        lower: tl.constexpr = PLANE_0_TO_FLOAT16 if PLANE == 0 else PLANE_1_TO_FLOAT16
        upper: tl.constexpr = PLANE_2_TO_FLOAT16 if PLANE == 2 else PLANE_3_TO_FLOAT16
        code: tl.constexpr = lower if PLANE < 2 else upper
        added = (-64.0 - zero).to(dtype)[:, None]
        return tl.inline_asm_elementwise(code, "=r,r,r", [words, added], dtype=tl.float16, is_pure=True, pack=2)
    else:
        first: tl.constexpr = PLANE_0_TO_BFLOAT16 if PLANE == 0 else PLANE_1_TO_BFLOAT16
        last: tl.constexpr = PLANE_2_TO_BFLOAT16 if PLANE == 2 else PLANE_3_TO_BFLOAT16
        short: tl.constexpr = first if PLANE < 2 else last
        added = (-16.0 - zero).to(dtype)[:, None]
        return tl.inline_asm_elementwise(short, "=r,r,r", [words, added], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def scale_and_zero(pairs):
    """Returns the scales and zero points, in float32, of `kernels.formats.planes.Int4Planes.pairs`."""
    return (pairs & ~ZERO).to(tl.float32, bitcast=True), (pairs & ZERO).to(tl.float32) * ZERO_STEP
