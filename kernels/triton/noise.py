"""Noise of sampling on the device: words and uniforms are bit-equal to those of `kernels.reference.philox`.

Counter = (token id // 4, position, output, 0), key = the seed, lane = token id % 4. Logarithms are computed by a
polynomial (Cephes, two units in the last place): the device's approximation changes the noise by up to 1e-3 near u = 0,
and the polynomial gives the same noise on every device, except for the fusing of products and sums.
"""

import triton
import triton.language as tl


@triton.jit
def uniform_words(seed, position, output, calls):
    """Returns uniforms in (0, 1) of the ids 4 c … 4 c + 3 for calls c int32 [N]: float32 [N, 4]. Scalars are int64."""
    zero = tl.zeros_like(calls)
    c1 = zero + position.to(tl.uint32).to(tl.int32, bitcast=True)
    c2 = zero + output.to(tl.uint32).to(tl.int32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, calls, c1, c2, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [calls.shape[0], 4])
    return tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def gumbel(uniform):
    """Returns -log(-log(1 - u)), standard Gumbel noise of float32 uniforms."""
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)  # the u that `rest` represents; the quotient corrects its rounding
    return -log(tl.where(rest == 1.0, uniform, -log(rest) * (uniform / lost)))


@triton.jit
def log(x):
    """Returns the natural logarithm of positive, normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    power = ((bits >> 23) & 255) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [0.5, 1)
    small = m < 0.7071067811865476
    power = tl.where(small, power - 1, power)
    m = tl.where(small, m + m, m) - 1.0
    z = m * m
    p = 7.0376836292e-2 * m - 1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m - 1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m - 1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m - 2.4999993993e-1
    p = p * m + 3.3333331174e-1
    e = power.to(tl.float32)
    return m + (m * z * p - e * 2.12194440e-4 - 0.5 * z) + e * 0.693359375
