"""Operators of torch that are not part of its public interface: each with a test that it agrees with a public one.

They may go, change their arguments or their results with any release. Asked before each use is packed, so that a
torch without one, or with another one of that name, serves by another path and says why.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = 0.02  # of the root mean square of what the public operator gives; bfloat16 rounds by 2^-9


@dataclasses.dataclass(frozen=True, slots=True)
class PrivateOperator:
    """Attributes:
    private: what is used, of x [M, K] and weight [N, K].
    public: what it must agree with.
    dtype: of both.
    """

    private: Callable[[Tensor, Tensor], Tensor]
    public: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype


def pack_linear(weight: Tensor) -> Tensor:
    """weight [N, K], float32 or bfloat16, in oneDNN's own layout, opaque, for `packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] → [M, N], all of the weight's dtype."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


PACKED_LINEAR = {
    dtype: PrivateOperator(lambda x, w: packed_linear(x, pack_linear(w), None), F.linear, dtype)
    for dtype in (torch.float32, torch.bfloat16)
}


def fault(operator: PrivateOperator) -> str:
    """Why it must not be used: "is missing: …" or "disagrees …"; empty when it may."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).to(operator.dtype) for size in ((5, 32), (16, 32)))
    want = operator.public(x, weight).float()
    try:
        error = (operator.private(x, weight).float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    except (AttributeError, RuntimeError, TypeError) as error_:
        return f"is missing from torch {torch.__version__} ({type(error_).__name__})"
    if not error <= TOLERANCE:  # also NaN
        return f"of torch {torch.__version__} disagrees with its plain one by {float(error):.2g} of its size"
    return ""
