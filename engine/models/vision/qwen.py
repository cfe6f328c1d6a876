"""What the vision towers of Qwen's models share: the convolution over patches, and what makes tokens of these."""

from torch import Tensor

from sluice_server.engine.models.encoders.layers import Norm
from sluice_server.engine.models.vision.encoding import Parts, by_rows, rows_of
from sluice_server.engine.models.vision.qwen_config import QwenTower
from sluice_server.engine.models.vision.weights import VisionWeights
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear

PREFIXES = ("visual.", "model.visual.")
FIRST = "patch_embed.proj.weight"
EPS = 1e-6  # of every norm; files do not have it


class Merger:
    """Makes a token of the patches of a square: a norm, and two matrices with GELU between them."""

    def __init__(self, norm: Norm, normed: int, first: PackedLinear, second: PackedLinear, size: int) -> None:
        """`size`: of the hidden states of a square, of which `normed` numbers are normed together."""
        self._norm, self._normed, self._first, self._second, self._size = norm, normed, first, second, size

    @property
    def linears(self) -> list[PackedLinear]:
        """The matrices, in the order in which they are used."""
        return [self._first, self._second]

    def parts(self, h: Tensor) -> Parts:
        """Computes the tokens [T, width] of the hidden states of patches."""
        return (yield from by_rows(h.view(-1, self._size), rows_of(self._size), self._merged))

    def _merged(self, squares: Tensor) -> Tensor:
        normed = self._norm.apply(squares.reshape(-1, self._normed)).view(-1, self._size)
        return ops.linear(ops.activate(ops.linear(normed, self._first), "gelu"), self._second).float()


def patch_linear(config: QwenTower, weights: VisionWeights, *, bias: bool) -> PackedLinear:
    """Returns the convolution over patches as a product. The pictures in time that a patch spans are equal, so that
    their weights are added up."""
    side, hidden = config.patch_size, config.hidden_size
    weight = weights.tensor(FIRST, hidden, 3, config.frames, side, side).sum(2).flatten(1)
    return weights.packed(weight, weights.tensor("patch_embed.proj.bias", hidden) if bias else None)
