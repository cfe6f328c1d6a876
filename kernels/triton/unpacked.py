"""Weights of 8 and 4 bits in planes, written out as numbers of the activations' format on a CUDA device.

For products with many rows, which a library multiplies faster by twice than a kernel that widens each weight again for
every tile of rows. Written before each product and freed behind it: no weight is kept twice. The reference
implementation is `kernels.formats.packed_weights.dequantise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats import planes
from sluice_server.kernels.formats.planes import Int4Planes, Int8Planes
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.widen import scale_and_zero

WORDS = 512  # of a row, in one program


def unpacked(packed: Int8Planes | Int4Planes, dtype: torch.dtype) -> Tensor:
    """Returns a weight [N, K] in `dtype`, scaled."""
    is_four = isinstance(packed, Int4Planes)
    outputs, inputs = len(packed.words), packed.inputs
    weight = torch.empty(outputs, inputs, dtype=dtype, device=packed.words.device)
    count = planes.PLANES4 if is_four else planes.PLANES8
    grid = (outputs, triton.cdiv(inputs, WORDS * count))
    unpack_kernel[grid](
        packed.words,
        packed.words.stride(0),
        packed.pairs if isinstance(packed, Int4Planes) else packed.scales,
        weight,
        outputs,
        inputs,
        packed.group if isinstance(packed, Int4Planes) else inputs,
        PLANES=count,
        PLANE=packed.plane if isinstance(packed, Int4Planes) else planes.PLANE,
        WORDS=WORDS,
    )
    return weight


@triton.jit
def unpack_kernel(
    words_ptr,  # int16 [outputs, ⌈inputs / (PLANES · PLANE)⌉ · PLANE], rows `words_stride` apart
    words_stride,
    scales_ptr,  # pairs [⌈inputs / group⌉, outputs]; of 8 bits, [outputs]
    weight_ptr,  # [outputs, inputs]
    outputs,
    inputs,
    group,
    PLANES: tl.constexpr,
    PLANE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Writes WORDS words of one row. Grid: outputs, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    first = word // PLANE * (PLANES * PLANE) + word % PLANE  # the input of a word's first plane
    is_word = word < tl.cdiv(inputs, PLANES * PLANE) * PLANE
    words = tl.load(words_ptr + row * words_stride + word, mask=is_word, other=0).to(tl.int32)
    for one in tl.static_range(PLANES):
        at = first + one * PLANE
        is_in = at < inputs
        if PLANES == 2:
            number = ((((words >> (8 * one)) & 255) ^ 128) - 128).to(tl.float32) * tl.load(scales_ptr + row)
        else:
            places = at // group * outputs + row
            scale, zero = scale_and_zero(tl.load(scales_ptr + places, mask=is_in, other=0))
            number = (((words >> (4 * one)) & 15).to(tl.float32) - zero) * scale
        tl.store(weight_ptr + row * inputs + at, number.to(weight_ptr.dtype.element_ty), mask=is_in)


def _case(count: int) -> AotCase:
    types = {"words_ptr": "*i16", "words_stride": "i64", "weight_ptr": "*bf16"}
    types |= {"scales_ptr": "*fp32" if count == planes.PLANES8 else "*i32"}
    types |= dict.fromkeys(("outputs", "inputs", "group"), "i32")
    constants = {"PLANES": count, "PLANE": planes.PLANE, "WORDS": WORDS}
    return AotCase(f"unpacked/{16 // count}", unpack_kernel, types, constants, vectors=frozenset({"loads"}))


CASES = (_case(planes.PLANES8), _case(planes.PLANES4))
