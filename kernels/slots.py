"""The cache's number formats in torch operators: how a key or value of one head lies in its slot.

float32 and bfloat16 as they are; int8 with its scale (float32: the head's greatest number / 127) in the four bytes
behind the levels, so that whatever moves a slot moves its scale. kernels/cpu/slots.h does the same.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
LEVELS = 127


def slot_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that one head's key or value takes in a cache of `dtype`."""
    return head_dim + (SCALE_BYTES if dtype is torch.int8 else 0)


def parts(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Views of a cache [..., slot_width]: its numbers [..., D], and in 8 bits their scales float32 [...]."""
    if cache.dtype is not torch.int8:
        return cache, None
    return cache[..., :head_dim], cache.view(torch.float32)[..., head_dim // SCALE_BYTES]


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] → [..., slot_width] of `dtype`. What holds a NaN or an infinity becomes NaN in 8 bits."""
    if dtype is not torch.int8:
        return x.to(dtype)
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    is_broken = (x * 0.0).sum(-1, keepdim=True) != 0.0
    by = torch.where(peak > 1e-30, LEVELS / peak, 0.0)
    levels = torch.where(is_broken, 0.0, (x * by).round_()).to(torch.int8)
    scales = torch.where(is_broken, float("nan"), peak / LEVELS)
    return torch.cat([levels, scales.view(torch.int8)], dim=-1)


def decode(slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """What `encode` made, [..., slot_width] → [..., head_dim] of `dtype`."""
    if slots.dtype is not torch.int8:
        return slots.to(dtype)
    scales = slots[..., head_dim:].contiguous().view(torch.float32)
    return slots[..., :head_dim].to(dtype) * scales.to(dtype)
