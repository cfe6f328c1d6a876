"""Encodes and decodes keys and values in the cache's number formats, in torch operators.

float32 and bfloat16 numbers are stored as they are. int8 and float8 numbers are stored with their scale (float32: the
head's greatest magnitude over that of the format) in the four bytes behind them, so that copying a slot also copies its
scale. kernels/cpu/slots.h does the same for int8. On a GPU, slots of 8 bits begin at multiples of 16 bytes, which one
thread loads at once. If strides are not such multiples, a kernel must load byte by byte.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import LARGEST

SCALE_BYTES = 4
GPU_ALIGN = 16  # bytes


def slot_width(head_dim: int, dtype: torch.dtype, align: int = SCALE_BYTES) -> int:
    """Returns the elements of one head's key or value in a cache of `dtype`; in 8 bits a multiple of `align`."""
    return -(-(head_dim + SCALE_BYTES) // align) * align if dtype in LARGEST else head_dim


def parts(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Returns views of a cache [..., slot_width]: its numbers [..., D] and, in 8 bits, their scales float32 [...]."""
    if cache.dtype not in LARGEST:
        return cache, None
    return cache[..., :head_dim], cache.view(torch.float32)[..., head_dim // SCALE_BYTES]


def encode(x: Tensor, dtype: torch.dtype, align: int = SCALE_BYTES) -> Tensor:
    """Encodes x [..., D] as [..., slot_width] of `dtype`.

    In 8 bits, a head with a NaN or an infinity becomes NaN.
    """
    largest = LARGEST.get(dtype)
    if largest is None:
        return x.to(dtype)
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    is_broken = (x * 0.0).sum(-1, keepdim=True) != 0.0
    scaled = torch.where(is_broken, 0.0, x * torch.where(peak > 1e-30, largest / peak, 0.0))
    numbers = (scaled.round_() if dtype is torch.int8 else scaled.clamp_(-largest, largest)).to(dtype)
    scales = torch.where(is_broken, float("nan"), peak / largest)
    whole = torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    return F.pad(whole, (0, -whole.shape[-1] % align)).view(dtype)


def decode(slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Decodes slots made by `encode`: [..., slot_width] → [..., head_dim] of `dtype`."""
    if slots.dtype not in LARGEST:
        return slots.to(dtype)
    scales = slots[..., head_dim : head_dim + SCALE_BYTES].contiguous().view(torch.float32)
    return slots[..., :head_dim].to(dtype) * scales.to(dtype)
