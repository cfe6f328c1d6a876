"""Products of a tile of attention with keys and values, which are numbers or words of two neighbours of 8 bits.

Tensor cores want values transposed, and what transposes them on the way from shared memory moves 16 bits: numbers of
8 bits would be put together one by one. A word goes there like a number of 16 bits, and few instructions take a plane,
the lower or the upper bytes, out of two words and widen it. So queries and sums of words are in two parts: their even
and their odd columns.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.widen import plane8, plane_float8, widened


@triton.jit
def prepared(q, slope, WIDTH: tl.constexpr, QUANTISED: tl.constexpr, IN_WORDS: tl.constexpr):
    """Returns queries [M, WIDTH] in the format of products, and for each the factor of its scores, of `slope`."""
    # Float16 is widened from 8 bits in half the instructions, with more registers than tiles of wide heads leave if
    # these are not in words.
    if QUANTISED and (IN_WORDS or WIDTH <= 128) and q.dtype == tl.bfloat16:
        peak = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), axis=1), 1e-30)
        q = (q.to(tl.float32) / peak[:, None]).to(tl.float16)  # so that no number is too large for it
        slope *= peak
    else:
        slope += tl.zeros((q.shape[0],), tl.float32)
    return q, slope


@triton.jit
def parted(x, IN_WORDS: tl.constexpr):
    """Returns the even and the odd columns of x [M, WIDTH]; x and 0 without words."""
    if IN_WORDS:
        return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        return x, 0


@triton.jit
def joined(even, odd, IN_WORDS: tl.constexpr):
    """Returns that of which `parted` made these."""
    if IN_WORDS:
        return tl.interleave(even, odd)
    else:
        return even


@triton.jit
def words_at(start, place, IN_WORDS: tl.constexpr):
    """Returns pointers [TILE, 1] to the first words of keys or values, or to their first numbers."""
    found = start + place[:, None]
    if IN_WORDS:  # of addresses in bytes, so that slots stay known to be aligned
        found = found.to(tl.pointer_type(tl.int16), bitcast=True)
    return found


@triton.jit
def plane(numbers, dtype: tl.constexpr, kind: tl.constexpr, IN_WORDS: tl.constexpr, PLANE: tl.constexpr):
    """Returns numbers in the format of products: of words of two numbers of a kind, those of a plane."""
    if not IN_WORDS:
        return widened(numbers, dtype)
    elif kind == tl.int8:
        return plane8(numbers, dtype, PLANE)
    else:
        return plane_float8(numbers, dtype, PLANE)


@triton.jit
def scored(q, odd_q, k, kind: tl.constexpr, IN_WORDS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the products of queries, in parts, with a tile of keys."""
    scores = tl.dot(q, tl.trans(plane(k, q.dtype, kind, IN_WORDS, 0)), input_precision=PRECISION)
    if IN_WORDS:
        odd = tl.trans(plane(k, q.dtype, kind, IN_WORDS, 1))
        scores = tl.dot(odd_q, odd, scores, input_precision=PRECISION)
    return scores


@triton.jit
def added(even, odd, weights, kept, v, kind: tl.constexpr, IN_WORDS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns sums in parts, of which a share is kept, plus weighted values of a tile."""
    own = plane(v, weights.dtype, kind, IN_WORDS, 0)
    even = tl.dot(weights, own, even * kept[:, None], input_precision=PRECISION)
    if IN_WORDS:
        other = plane(v, weights.dtype, kind, IN_WORDS, 1)
        odd = tl.dot(weights, other, odd * kept[:, None], input_precision=PRECISION)
    return even, odd
