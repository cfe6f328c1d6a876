"""Widens integers of 8 and 4 bits to half precision on a CUDA device, four at once, without conversion instructions.

A byte that is put behind the upper byte of a half-precision number is that number plus an integer: 0x64nn is 1024 + n
in float16, 0x43nn is 128 + n in bfloat16 where n has 7 bits. A difference leaves the integer, exactly. A conversion
takes four to sixteen times as long. The interpreter, which has no assembly, and other formats convert.
"""

import triton
import triton.language as tl

CONVERTS = tl.constexpr(triton.knobs.runtime.interpret)

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
# $2: four bytes of two nibbles; $3, $4: what is added to the numbers, and to 1024 or 128.
LOWER_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 bytes, low, high, one;
and.b32 bytes, $2, 0x0f0f0f0f;
prmt.b32 low, bytes, 0x64646464, 0x4140;
prmt.b32 high, bytes, 0x64646464, 0x4342;
mov.b32 one, 0x3c003c00;
fma.rn.f16x2 $0, low, one, $3;
fma.rn.f16x2 $1, high, one, $4;
}""")
LOWER_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 bytes, low, high, one;
and.b32 bytes, $2, 0x0f0f0f0f;
prmt.b32 low, bytes, 0x43434343, 0x4140;
prmt.b32 high, bytes, 0x43434343, 0x4342;
mov.b32 one, 0x3f803f80;
fma.rn.bf16x2 $0, low, one, $3;
fma.rn.bf16x2 $1, high, one, $4;
}""")
UPPER_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 bytes, low, high, one;
shr.b32 bytes, $2, 4;
and.b32 bytes, bytes, 0x0f0f0f0f;
prmt.b32 low, bytes, 0x64646464, 0x4140;
prmt.b32 high, bytes, 0x64646464, 0x4342;
mov.b32 one, 0x3c003c00;
fma.rn.f16x2 $0, low, one, $3;
fma.rn.f16x2 $1, high, one, $4;
}""")
UPPER_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 bytes, low, high, one;
shr.b32 bytes, $2, 4;
and.b32 bytes, bytes, 0x0f0f0f0f;
prmt.b32 low, bytes, 0x43434343, 0x4140;
prmt.b32 high, bytes, 0x43434343, 0x4342;
mov.b32 one, 0x3f803f80;
fma.rn.bf16x2 $0, low, one, $3;
fma.rn.bf16x2 $1, high, one, $4;
}""")


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
def nibbles(both, zero, dtype: tl.constexpr, IS_UPPER: tl.constexpr):
    """Returns the lower or upper nibbles of uint8 [N, K] less the zero points [N], integers from 0 to 15."""
    if CONVERTS or (dtype != tl.float16 and dtype != tl.bfloat16):
        own = both >> 4 if IS_UPPER else both & 15
        return own.to(dtype) - zero.to(dtype)[:, None]
    elif dtype == tl.float16:
        code: tl.constexpr = UPPER_TO_FLOAT16 if IS_UPPER else LOWER_TO_FLOAT16
        added = (-1024.0 - zero.to(tl.float32)).to(dtype)[:, None]
        return tl.inline_asm_elementwise(code, "=r,=r,r,r,r", [both, added], dtype=tl.float16, is_pure=True, pack=4)
    else:
        short: tl.constexpr = UPPER_TO_BFLOAT16 if IS_UPPER else LOWER_TO_BFLOAT16
        added = (-128.0 - zero.to(tl.float32)).to(dtype)[:, None]
        return tl.inline_asm_elementwise(short, "=r,=r,r,r,r", [both, added], dtype=tl.bfloat16, is_pure=True, pack=4)
