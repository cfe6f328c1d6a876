"""Converts the layouts in which quantised checkpoints are published to the forms of `kernels.formats.packed_weights`.

AutoAWQ, AutoGPTQ, compressed-tensors, the microscaling formats (MXFP4, NVFP4), and float8 in blocks. Takes tensors as
they are stored; depends on no checkpoint's tensor names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import (
    Int4Weight,
    Int8GroupedWeight,
    Packed,
    WideWeight,
    pack_nibbles,
)

WORD = 32  # bits of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, from the lowest nibble
FLOAT4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # magnitudes of the floats of 4 bits (E2M1), by their lower three bits
MIDDLE = 128  # the level that means zero where levels of 8 bits have no zero points
EXPONENT_BIAS = 127  # of the powers of two that scale MXFP4 (E8M0)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Packed:
    """Converts AutoAWQ's layout: qweight int32 [K, N / 8], qzeros int32 [groups, N / 8], scales [groups, N]."""
    values, zeros = (_numbers(words, AWQ_ORDER) for words in (qweight, qzeros))
    return grouped(values.t(), zeros, scales, group, 4)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, bits: int, shift: int, g_idx: Tensor | None = None
) -> Packed:
    """Converts AutoGPTQ's layout.

    That is qweight int32 [K · bits / 32, N], qzeros int32 [groups, N · bits / 32], to which `shift` is added, scales
    [groups, N], and for inputs that are not in the order of their groups (`desc_act`) the group of each, g_idx [K].
    Raises ValueError for a g_idx outside the groups.
    """
    order = range(WORD // bits)
    values, zeros = _numbers(qweight.t().contiguous(), order), _numbers(qzeros, order) + shift
    return in_order(values, zeros, scales, group, bits, g_idx)


def from_words(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int, g_idx: Tensor | None = None
) -> Packed:
    """Converts compressed-tensors' packed integers.

    That is packed int32 [N, K · bits / 32], scales [N, groups], zeros int32 [N · bits / 32, groups] or None for
    symmetric weights. Integers are stored with 2^(bits - 1) added. Raises ValueError for a g_idx outside the groups.
    """
    order = range(WORD // bits)
    by_group = scales.t().contiguous()
    middle = torch.full(by_group.shape, 1 << bits - 1, dtype=torch.int32, device=packed.device)
    offsets = middle if zeros is None else _numbers(zeros.t().contiguous(), order)
    return in_order(_numbers(packed, order), offsets, by_group, group, bits, g_idx)


def in_order(values: Tensor, zeros: Tensor, scales: Tensor, group: int, bits: int, g_idx: Tensor | None) -> Packed:
    """Returns a weight of groups, or its values where its inputs are not in the order of their groups."""
    inputs, num = values.shape[1], len(scales)
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(inputs, device=g_idx.device) // group):
        return grouped(values, zeros, scales, group, bits)
    index = g_idx.long()
    if int(index.amin()) < 0 or int(index.amax()) >= num:
        raise ValueError(f"g_idx names group {int(index.abs().amax())}, and there are {num}")
    zeros, scales = zeros.float()[index].t(), scales.float()[index].t()
    return WideWeight((values.float() - zeros) * scales)


def grouped(values: Tensor, zeros: Tensor, scales: Tensor, group: int, bits: int) -> Packed:
    """Returns the weight (values [N, K] - zeros [groups, N]) · scales [groups, N] with levels of 4 or 8 bits."""
    if bits == 4:
        return Int4Weight(pack_nibbles(values), scales, zeros.to(scales.dtype), values.shape[1], group)
    return Int8GroupedWeight(values.to(torch.uint8), scales.float(), zeros.float(), group)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Packed:
    """Converts MXFP4: blocks uint8 [N, K / 32, 16] of two floats each, scales uint8 [N, K / 32], exponents of two.

    Twice a float of 4 bits is an integer, so that levels of 8 bits hold it without rounding.
    """
    levels = _float4(blocks.flatten(1)) * 2 + MIDDLE
    by_group = torch.exp2(scales.float() - EXPONENT_BIAS - 1).t().contiguous()
    return Int8GroupedWeight(levels.to(torch.uint8), by_group, torch.full_like(by_group, MIDDLE), 32)


def from_nvfp4(packed: Tensor, scales: Tensor, factor: Tensor) -> Packed:
    """Converts NVFP4: packed uint8 [N, K / 2], scales float8_e4m3fn [N, K / 16], `factor` for the whole weight.

    No kernel takes groups of 16: these are values.
    """
    values = _float4(packed).unflatten(1, (scales.shape[1], -1))
    return WideWeight((values * (scales.float() * factor.float()).unsqueeze(2)).flatten(1))


def from_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int], within: tuple[int, int] = (0, 0)) -> Packed:
    """Converts float8 [N, K] with a scale for each block: scales [⌈N / rows⌉, ⌈K / inputs⌉]; these are values.

    `within`: where in the first block the first row and input are.
    """
    wide = scales.float().repeat_interleave(block[0], 0)[within[0] :][: len(weight)]
    wide = wide.repeat_interleave(block[1], 1)[:, within[1] :][:, : weight.shape[1]]
    return WideWeight(weight.float().mul_(wide))


def _float4(packed: Tensor) -> Tensor:
    """Returns the floats of bytes [N, B] that hold two each, the first in the lower half: float32 [N, 2 B]."""
    table = torch.tensor([*FLOAT4, *(-one for one in FLOAT4)], device=packed.device)
    return torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=2).flatten(1)


def _numbers(words: Tensor, order: Sequence[int]) -> Tensor:
    """Unpacks int32 [A, B] into numbers [A, B · len(order)]; the i-th of a word, from its lowest bits, is order[i]."""
    num = len(order)
    bits = WORD // num
    shifts = torch.tensor([bits * list(order).index(one) for one in range(num)], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)
