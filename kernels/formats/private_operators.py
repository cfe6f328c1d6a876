"""Operators of torch outside its public interface, each with a check that it agrees with a public operator.

Any release may remove them or change their arguments or results. `fault` checks an operator before a weight is packed
for it. If the operator is missing or disagrees, another implementation serves and the reason is reported.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = 0.02  # relative to the root mean square of the public operator's result; bfloat16 rounds by 2^-9


@dataclasses.dataclass(frozen=True, slots=True)
class PrivateOperator:
    """A private operator and the public one that it must agree with.

    Attributes:
        private: the operator that is used, a function of x [M, K] and weight [N, K].
        public: the operator whose result it must match.
        dtype: dtype of x and weight.
    """

    private: Callable[[Tensor, Tensor], Tensor]
    public: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype


def pack_linear(weight: Tensor) -> Tensor:
    """Packs weight [N, K], float32 or bfloat16, in oneDNN's own opaque layout, for `packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x [M, K] by a packed weight; returns [M, N], all in the weight's dtype."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


PACKED_LINEAR = {
    dtype: PrivateOperator(lambda x, w: packed_linear(x, pack_linear(w), None), F.linear, dtype)
    for dtype in (torch.float32, torch.bfloat16)
}


def fault(operator: PrivateOperator) -> str:
    """Returns why the operator must not be used, "is missing from …" or "… disagrees …"; empty if it may be used."""
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
