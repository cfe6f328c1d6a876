"""Linear layers of one row, with the norm before and the gate or the sum behind, by torch's operators."""

import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.reference.elementwise import GATES, rms_norm

__all__ = ["GATES", "linear"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies a row; see `kernels.triton.gemv.linear`."""
    own = x if norm is None else rms_norm(x, *norm, weight.dtype)
    y = F.linear(own.to(weight.dtype), weight, bias)
    y = GATES[gate](y) if gate else y
    if out is not None:
        return out.copy_(y)
    return y if residual is None else residual.add_(y)
