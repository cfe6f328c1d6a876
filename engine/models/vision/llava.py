"""LLaVA's vision tower and projector (Liu et al. 2023): pixels of an image in, rows in the place of its tokens out."""

from torch import Tensor

from sluice_server.engine.images import Grid
from sluice_server.engine.models.vision.clip import FIRST, PREFIXES, ClipTower
from sluice_server.engine.models.vision.encoding import Parts
from sluice_server.engine.models.vision.llava_config import LlavaVision
from sluice_server.engine.models.vision.weights import VisionWeights
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import gather

PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")


class LlavaTower:
    """A tower of CLIP's form, and two matrices behind it.

    Attributes:
        width: numbers of a token's row.
    """

    def __init__(self, config: LlavaVision, weights: VisionWeights, width: int) -> None:
        """`width`: of the text model's hidden states."""
        self._config, self.width = config, width
        self._tower = ClipTower(config.tower, weights.below(PREFIXES, FIRST), config.num_layers)
        behind, bias = weights.below(PROJECTORS, "linear_1.weight"), config.has_bias
        self._first = behind.linear(["linear_1"], width, config.tower.hidden_size, bias=bias)
        self._second = behind.linear(["linear_2"], width, width, bias=bias)
        gather([*self._tower.linears, self._first, self._second])

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows of an image; see `VisionTower`."""
        h = yield from self._tower.parts(pixels)
        if self._config.tower.is_clip and not self._config.keeps_class:
            h = h[1:].contiguous()
        return ops.linear(ops.activate(ops.linear(h, self._first), self._config.activation), self._second).float()
