"""The packer of linear layers: the weight format that an engine was started with, as models apply it to each weight."""

import dataclasses

from torch import Tensor

from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.weight_formats import WEIGHED, pack


@dataclasses.dataclass(frozen=True, slots=True)
class LinearPacker:
    """Packs weights in one format for the device they are on.

    Attributes:
        weights: the format; empty for their own dtype.
    """

    weights: str = ""

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded."""
        return bool(self.weights)

    @property
    def weighs(self) -> bool:
        """Whether weights are rounded better when it is known how large their inputs are."""
        return self.weights in WEIGHED

    def __call__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        precise: bool = False,
        importance: Tensor | None = None,
    ) -> PackedLinear:
        """Packs a weight [N, K] and a bias [N]; `importance` [K] is the mean square of each input, or None."""
        return pack(weight, bias, gated=gated, precise=precise, weights=self.weights, importance=importance)


PLAIN = LinearPacker()
