"""Qwen3-VL's vision tower (Bai et al. 2025): images of any size, and rows from several depths.

A token's row has the width of the text model's hidden states once for the tower's output, and once for each depth,
which the text model adds behind its first layers (DeepStack).
"""

import torch
from torch import Tensor

from sluice_server.engine.images import Grid
from sluice_server.engine.models.encoders.layers import EncoderLayer
from sluice_server.engine.models.vision.encoding import Parts, by_rows, rows_of
from sluice_server.engine.models.vision.qwen import EPS, FIRST, PREFIXES, Merger, patch_linear
from sluice_server.engine.models.vision.qwen_config import Qwen3Vision, QwenTower
from sluice_server.engine.models.vision.squares import places_of, rotation_of
from sluice_server.engine.models.vision.weights import VisionWeights, linears_of
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import gather


class Qwen3Tower:
    """The weights of one tower.

    Attributes:
        width: numbers of a token's row.
    """

    def __init__(self, config: Qwen3Vision, weights: VisionWeights, width: int) -> None:
        """`width`: of the text model's hidden states."""
        self._config, self.width = config, width * (1 + len(config.deep))
        tower, own = config.tower, weights.below(PREFIXES, FIRST)
        self._patches = patch_linear(tower, own, bias=True)
        self._positions = own.tensor("pos_embed.weight", config.side**2, tower.hidden_size)
        self._layers = [_layer(tower, own, index) for index in range(tower.num_layers)]
        self._merger = _merger(tower, own, "merger", width, tower.hidden_size)
        size = tower.hidden_size * tower.merged**2
        self._deep = {
            layer: _merger(tower, own, f"deepstack_merger_list.{at}", width, size)
            for at, layer in enumerate(config.deep)
        }
        mergers = [one for merger in (self._merger, *self._deep.values()) for one in merger.linears]
        gather([self._patches, *linears_of(self._layers), *mergers])

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows of an image; see `VisionTower`."""
        config, tower, num = self._config, self._config.tower, rows_of(self._config.tower.hidden_size)
        row, column = places_of(grid, tower.merged)
        cis = rotation_of(row, column, tower.dim, tower.theta).to(pixels.device)
        patches = pixels.view(len(row), -1)
        h = yield from by_rows(patches, num, lambda rows: ops.linear(rows, self._patches).float())
        h += embedded_places(
            self._positions, config.side, (row, column), (grid[0] * tower.merged, grid[1] * tower.merged)
        )
        deep = []
        for index, layer in enumerate(self._layers):
            yield from layer.parts(h, num, cis)
            if index in self._deep:
                deep.append((yield from self._deep[index].parts(h)))
        tokens = yield from self._merger.parts(h)
        return torch.cat([tokens, *deep], dim=1)


def embedded_places(table: Tensor, side: int, places: tuple[Tensor, Tensor], sizes: Grid) -> Tensor:
    """Returns the embedding of each patch's place in an image of so many patches, between those of a square of `side`
    by `side` whose corners are the image's: the table's four nearest, weighted."""
    near, shares = [], []
    for place, size in zip(places, sizes, strict=True):
        at = place.to(table.device).float() * (side - 1) / max(size - 1, 1)
        low = at.floor()
        near.append((low.long(), (low.long() + 1).clamp(max=side - 1)))
        shares.append((1 - (at - low), at - low))
    found = torch.zeros(len(places[0]), table.shape[1], device=table.device)
    for row, by_row in zip(near[0], shares[0], strict=True):
        for column, by_column in zip(near[1], shares[1], strict=True):
            found += table[row * side + column] * (by_row * by_column)[:, None]
    return found


def _merger(config: QwenTower, weights: VisionWeights, name: str, width: int, normed: int) -> Merger:
    size = config.hidden_size * config.merged**2
    first, second = (
        weights.linear([f"{name}.linear_fc1"], size, size),
        weights.linear([f"{name}.linear_fc2"], width, size),
    )
    return Merger(weights.norm(f"{name}.norm", normed, EPS), normed, first, second, size)


def _layer(config: QwenTower, weights: VisionWeights, index: int) -> EncoderLayer:
    hidden, inner, at = config.hidden_size, config.intermediate_size, f"blocks.{index}."
    return EncoderLayer(
        qkv=weights.linear([f"{at}attn.qkv"], 3 * hidden, hidden),
        output=weights.linear([f"{at}attn.proj"], hidden, hidden),
        up=weights.linear([f"{at}mlp.linear_fc1"], inner, hidden),
        down=weights.linear([f"{at}mlp.linear_fc2"], hidden, inner),
        attention_norm=weights.norm(f"{at}norm1", hidden, EPS),
        mlp_norm=weights.norm(f"{at}norm2", hidden, EPS),
        heads=config.num_heads,
        window=None,
        activation=config.activation,
        is_gated=False,
        is_pre_normed=True,
    )
