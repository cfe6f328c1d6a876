"""Qwen2.5-VL's vision tower (Bai et al. 2025): images of any size, and layers that attend in windows.

Patches are sorted by window. A window has as many tokens as fit its side; those at the border are smaller.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.engine.images import Grid
from sluice_server.engine.models.encoders.layers import EncoderLayer
from sluice_server.engine.models.vision.encoding import Parts, by_rows, rows_of
from sluice_server.engine.models.vision.qwen import EPS, FIRST, PREFIXES, Merger, patch_linear
from sluice_server.engine.models.vision.qwen_config import Qwen25Vision, QwenTower
from sluice_server.engine.models.vision.squares import places_of, rotation_of
from sluice_server.engine.models.vision.weights import VisionWeights, linears_of
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import gather


class Qwen25Tower:
    """The weights of one tower.

    Attributes:
        width: numbers of a token's row.
    """

    def __init__(self, config: Qwen25Vision, weights: VisionWeights, width: int) -> None:
        """`width`: of the text model's hidden states."""
        self._config, self.width = config, width
        tower, own = config.tower, weights.below(PREFIXES, FIRST)
        self._patches = patch_linear(tower, own, bias=False)
        self._layers = [_layer(tower, own, index) for index in range(tower.num_layers)]
        size = tower.hidden_size * tower.merged**2
        first, second = own.linear(["merger.mlp.0"], size, size), own.linear(["merger.mlp.2"], width, size)
        norm = own.root_norm("merger.ln_q", tower.hidden_size, EPS)
        self._merger = Merger(norm, tower.hidden_size, first, second, size)
        gather([self._patches, *linears_of(self._layers), *self._merger.linears])

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows of an image; see `VisionTower`."""
        config, tower, num = self._config, self._config.tower, rows_of(self._config.tower.hidden_size)
        order, ends = windows_of(grid, config.window)
        each = tower.merged**2
        row, column = (one.view(-1, each)[order].flatten() for one in places_of(grid, tower.merged))
        cis = rotation_of(row, column, tower.dim, tower.theta).to(pixels.device)
        order = order.to(pixels.device)
        patches = pixels.view(len(order), -1)[order].view(len(row), -1)
        h = yield from by_rows(patches, num, lambda rows: ops.linear(rows, self._patches).float())
        for index, layer in enumerate(self._layers):
            yield from layer.parts(h, num, cis, () if index in config.full else [each * end for end in ends])
        tokens = yield from self._merger.parts(h)
        rows = torch.empty_like(tokens)
        rows[order] = tokens
        return rows


def windows_of(grid: Grid, side: int) -> tuple[Tensor, Sequence[int]]:
    """Returns the tokens of an image window by window, int64, and where each window of them ends."""
    rows, columns = (torch.arange(num) // side for num in grid)
    window = (rows[:, None] * (columns[-1] + 1) + columns[None]).flatten()
    return window.argsort(stable=True), torch.bincount(window).cumsum(0).tolist()


def _layer(config: QwenTower, weights: VisionWeights, index: int) -> EncoderLayer:
    hidden, inner, at = config.hidden_size, config.intermediate_size, f"blocks.{index}."
    return EncoderLayer(
        qkv=weights.linear([f"{at}attn.qkv"], 3 * hidden, hidden),
        output=weights.linear([f"{at}attn.proj"], hidden, hidden),
        up=weights.linear([f"{at}mlp.gate_proj", f"{at}mlp.up_proj"], inner, hidden),
        down=weights.linear([f"{at}mlp.down_proj"], hidden, inner),
        attention_norm=weights.root_norm(f"{at}norm1", hidden, EPS),
        mlp_norm=weights.root_norm(f"{at}norm2", hidden, EPS),
        heads=config.num_heads,
        window=None,
        activation=config.activation,
        is_gated=True,
        is_pre_normed=True,
    )
