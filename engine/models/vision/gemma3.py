"""Gemma 3's vision tower, SigLIP's, and its projector: a token is the mean of a square of patches, normed and
multiplied by one matrix."""

from torch import Tensor

from sluice_server.engine.images import Grid
from sluice_server.engine.models.encoders.layers import RootNorm
from sluice_server.engine.models.vision.clip import FIRST, PREFIXES, ClipTower
from sluice_server.engine.models.vision.encoding import Parts, by_rows, rows_of
from sluice_server.engine.models.vision.gemma3_config import Gemma3Vision
from sluice_server.engine.models.vision.llava import PROJECTORS
from sluice_server.engine.models.vision.weights import VisionWeights
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import gather

_MATRIX = "mm_input_projection_weight"


class Gemma3Tower:
    """The weights of one tower and its projector.

    Attributes:
        width: numbers of a token's row.
    """

    def __init__(self, config: Gemma3Vision, weights: VisionWeights, width: int) -> None:
        """`width`: of the text model's hidden states."""
        self._config, self.width = config, width
        own, behind = weights.below(PREFIXES, FIRST), weights.below(PROJECTORS, _MATRIX)
        hidden, eps = config.tower.hidden_size, config.tower.norm_eps
        self._tower = ClipTower(config.tower, own, config.tower.num_layers)
        self._last_norm = own.norm("post_layernorm", hidden, eps)
        self._norm = RootNorm(behind.tensor("mm_soft_emb_norm.weight", hidden) + 1.0, eps)  # files have it less 1
        self._matrix = behind.packed(behind.tensor(_MATRIX, hidden, width).t().contiguous())
        gather([*self._tower.linears, self._matrix])

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows of an image; see `VisionTower`."""
        h = yield from self._tower.parts(pixels)
        hidden, side = self._config.tower.hidden_size, self._config.side
        h = yield from by_rows(h, rows_of(hidden), self._last_norm.apply)
        within = self._config.tower.patches[0] // side
        means = h.view(side, within, side, within, hidden).mean((1, 3)).view(side * side, hidden)
        return (yield from by_rows(means, rows_of(hidden), self._projected))

    def _projected(self, means: Tensor) -> Tensor:
        return ops.linear(self._norm.apply(means), self._matrix).float()
