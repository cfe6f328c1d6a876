"""Counter-based noise: Philox4x32-10 (Salmon et al., 2011) in torch integer operators, for any device of torch.

Defines the mapping (seed, position, output, token id) -> noise. Key = the 64-bit seed as two words (low, high); counter
= (token_id // 4, position, output, 0); lane = token_id % 4, so that one call serves four neighbouring ids. Stateless:
the same coordinates give the same bits in any batch. Bit-equal to Triton's `tl.philox`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LANES = 4
ROUNDS = 10

# Bounds of the noise `gumbel(uniforms(...))`, rounded outwards: u is in [2**-33, 1 - 2**-24].
GUMBEL_MIN = -2.9
GUMBEL_MAX = 23.0

# Words are int64 in [0, 2**32), whose products are exact modulo 2**64: torch has hardly any uint32 arithmetic.
# Constants are 0-dim tensors, because wrapping a Python number costs 1.2-1.7 us at every op (measured, CPU).
_M0 = torch.tensor(0xD2511F53)
_M1 = torch.tensor(0xCD9E8D57)
_W = torch.tensor([0x9E3779B9, 0xBB67AE85])
_WORD = torch.tensor(0xFFFFFFFF)
_HALF = torch.tensor(32)

# Philox calls of one pass over a row: six int64 buffers of 128 KiB fit in a core's L2, and ops below 32,768 elements
# are not split over threads; splitting costs more than it gains when the cores are shared (measured: 41 ns a call, 2
# MiB L2).
_CALLS = 16_384


class PhiloxWords(NamedTuple):
    """Four 32-bit words as int64 tensors of one shape, or of shapes that broadcast."""

    c0: Tensor
    c1: Tensor
    c2: Tensor
    c3: Tensor


def uniforms(seeds: Tensor, positions: Tensor, outputs: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the uniform noise of chosen ids: float32 [R, K] in (0, 1).

    Args:
        seeds: int64 [R], the two's complement of the unsigned 64-bit seed.
        positions, outputs: int64 [R], each in [0, 2**32).
        token_ids: int64 [R, K] in [0, 2**34).
    """
    counter = PhiloxWords(token_ids >> 2, *_row_words(positions, outputs))
    words = philox(counter, seeds)
    lanes = torch.stack(words)
    return _to_unit(lanes.gather(0, (token_ids & 3)[None])[0])


def row_uniforms(seeds: Tensor, positions: Tensor, outputs: Tensor, vocab: int) -> Tensor:
    """Returns the uniform noise of the ids 0..vocab-1: float32 [R, vocab] in (0, 1), bit-equal to that of `uniforms`.

    Args:
        seeds, positions, outputs: as in `uniforms`.
    """
    calls = -(-vocab // LANES)
    noise = torch.empty((len(seeds), calls, LANES), dtype=torch.float32, device=seeds.device)
    counters = torch.arange(calls, device=seeds.device)[None]
    across = min(calls, _CALLS)
    down = _CALLS // across
    for row in range(0, len(seeds), down):
        rows = slice(row, row + down)
        words = _row_words(positions[rows], outputs[rows])
        for first in range(0, calls, across):
            part = slice(first, first + across)
            lanes = philox(PhiloxWords(counters[:, part], *words), seeds[rows])
            for lane, word in enumerate(lanes):
                noise[rows, part, lane] = word
    return _to_unit(noise).view(len(seeds), calls * LANES)[:, :vocab]


def gumbel(uniform: Tensor) -> Tensor:
    """Turns uniform noise into standard Gumbel noise in place: -log(-log(1 - u)), within [GUMBEL_MIN, GUMBEL_MAX].

    1 - u is as uniform as u. Large noise decides the result, and comes from u near 0, where float32 has finer steps
    than near 1: the top of the range is exact to 2**-33 instead of 2**-24.
    """
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox(counter: PhiloxWords, seeds: Tensor) -> PhiloxWords:
    """Computes ten rounds: 4 words in [0, 2**32) for each call.

    Args:
        counter: int64 words in [0, 2**32), shapes that broadcast to [R, N].
        seeds: int64 [R].
    """
    keys = _key_schedule(seeds)
    words = counter
    for low, high in keys[:3]:  # all words have grown to [R, N] only after these rounds
        words = _round(words, low, high)
    c0, c1, c2, c3 = words
    spare0, spare1 = torch.empty_like(c0), torch.empty_like(c0)
    for low, high in keys[3:]:  # the same round without allocations
        torch.mul(c0, _M0, out=spare0)
        torch.mul(c2, _M1, out=spare1)
        torch.bitwise_right_shift(spare1, _HALF, out=c0).bitwise_xor_(c1).bitwise_xor_(low).bitwise_and_(_WORD)
        torch.bitwise_right_shift(spare0, _HALF, out=c2).bitwise_xor_(c3).bitwise_xor_(high).bitwise_and_(_WORD)
        c1, spare1, c3, spare0 = spare1, c1, spare0, c3
    return PhiloxWords(c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD))


def _round(words: PhiloxWords, low: Tensor, high: Tensor) -> PhiloxWords:
    """Computes one round. c1 and c3 are returned as whole products, of which the next round masks the low half."""
    c0, c1, c2, c3 = words
    product0, product1 = c0 * _M0, c2 * _M1
    return PhiloxWords(
        ((product1 >> _HALF) ^ c1 ^ low) & _WORD,
        product1,
        ((product0 >> _HALF) ^ c3 ^ high) & _WORD,
        product0,
    )


def _key_schedule(seeds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the (low, high) key words of each round, int64 [R, 1]."""
    device = seeds.device
    key = torch.stack((seeds & _WORD, (seeds >> _HALF) & _WORD), dim=-1)  # [R, 2]
    steps = torch.arange(ROUNDS, device=device)[:, None, None] * _W.to(device)  # [ROUNDS, 1, 2]
    schedule = (key + steps) & _WORD  # [ROUNDS, R, 2]
    low, high = schedule[..., None].unbind(2)  # [ROUNDS, R, 1] each
    return list(zip(low.unbind(0), high.unbind(0), strict=True))


def _row_words(positions: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs = outputs[:, None]
    return positions[:, None], outputs, torch.zeros_like(outputs)


def _to_unit(words: Tensor) -> Tensor:
    """Returns (word + 1/2) / 2**32 in float32, clamped below 1. Takes float32 or int64 words."""
    return words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1.0 - 2.0**-24)
