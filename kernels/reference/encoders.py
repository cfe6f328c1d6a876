"""Operations of encoders in torch operators, for any device and dtype: attention to a whole input, norms, activations.

The bits of an input's rows depend on that input alone on a CPU: attention is computed input by input, and loops of
activations end where rows do.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.reference.elementwise import SPLIT

BLOCK = 128  # queries that are computed at a time where each sees a window of keys
LANES = 64  # numbers in the widest vector that a loop of torch computes at once
FURTHEST = 128  # distance between tokens from which on all share a bucket


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 1.702).mul_(x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, name: str) -> Tensor:
    """Returns an activation of x [T, N].

    Torch computes the last numbers of a loop, which do not fill a vector, with other instructions. On a CPU its loops
    therefore cover whole rows, several only where a row fills its vectors, and too few for torch to split them.
    """
    function = ACTIVATIONS[name]
    width = x.shape[-1]
    if x.device.type != "cpu" or len(x) <= 1:
        return function(x)
    num = max(1, (SPLIT - 1) // width) if width % LANES == 0 else 1
    out = torch.empty_like(x)
    for first in range(0, len(x), num):
        out[first : first + num] = function(x[first : first + num])
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns LayerNorm over the last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotate_halves(x: Tensor, cis: Tensor) -> Tensor:
    """Returns x [T, heads, D] with the pairs (i, i + D/2) rotated by cis (complex64 [T, D/2])."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cis.real.unsqueeze(1), cis.imag.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], window: int | None = None, bias: Tensor | None = None
) -> Tensor:
    """Computes attention of every token to all tokens of its own input, before it and behind it.

    Args:
        q, k, v: [T, heads, D], of all inputs one after the other.
        ends: where each input ends.
        window: tokens on either side that a token sees; None for all.
        bias: [heads, L, L] added to scores, for the longest input; None for none.

    Returns:
        [T, heads * D].
    """
    out, first = torch.empty_like(q), 0
    for end in ends:
        rows = slice(first, end)
        if window is None or end - first <= window + 1:
            near = None if bias is None else bias[:, : end - first, : end - first]
            out[rows] = _whole(q[rows], k[rows], v[rows], near)
        else:
            out[rows] = _windowed(q[rows], k[rows], v[rows], window)
        first = end
    return out.flatten(1)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention of queries [M, heads, D] to all keys and values [L, heads, D]: [M, heads * D]."""
    return _whole(q, k, v, None).flatten(1)


def distance_buckets(num: int, num_buckets: int, device: torch.device) -> Tensor:
    """Returns the bucket of each distance between `num` tokens, int64 [num, num] (Raffel et al. 2020).

    Half of the buckets are for keys behind the query. Small distances have one each, larger ones share them by their
    logarithm.
    """
    at = torch.arange(num, device=device)
    behind = at[:, None] - at[None, :]  # how far the key is before the query
    half = num_buckets // 2
    far, few = behind.abs(), half // 2
    shared = few + (torch.log(far.float() / few) / math.log(FURTHEST / few) * (half - few)).long()
    return (behind < 0).long() * half + torch.where(far < few, far, shared.clamp(max=half - 1))


def _whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Returns attention of queries [L, heads, D] to all keys; `mask` is added to scores, or says which are seen."""
    q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    found, num = [], len(q)
    for first in range(0, num, BLOCK):
        end = min(first + BLOCK, num)
        low, high = max(0, first - window), min(num, end + window)
        queries, keys = torch.arange(first, end, device=q.device), torch.arange(low, high, device=q.device)
        seen = (queries[:, None] - keys[None, :]).abs() <= window
        found.append(_whole(q[first:end], k[low:high], v[low:high], seen))
    return torch.cat(found)
