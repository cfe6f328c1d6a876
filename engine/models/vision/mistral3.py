"""Mistral 3's vision tower, Pixtral's (Agrawal et al. 2024), and its projector, which makes a token of each square.

The rows of an image have those of the ids between its lines too: embeddings of the text model, always the same.
"""

import torch
from torch import Tensor

from sluice_server.engine.images import Grid
from sluice_server.engine.models.encoders.layers import EncoderLayer
from sluice_server.engine.models.vision.encoding import Parts, by_rows, rows_of
from sluice_server.engine.models.vision.llava import PROJECTORS
from sluice_server.engine.models.vision.mistral3_config import Mistral3Vision
from sluice_server.engine.models.vision.squares import places_of, rotation_of
from sluice_server.engine.models.vision.weights import VisionWeights, linears_of
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear, gather

PREFIXES = ("vision_tower.", "model.vision_tower.")
EPS = 1e-5  # of the tower's norms; files do not have it


class Mistral3Tower:
    """The weights of one tower and its projector.

    Attributes:
        width: numbers of a token's row.
    """

    def __init__(self, config: Mistral3Vision, weights: VisionWeights, width: int) -> None:
        """`width`: of the text model's hidden states."""
        self._config, self.width = config, width
        own, behind = weights.below(PREFIXES, "ln_pre.weight"), weights.below(PROJECTORS, "norm.weight")
        hidden, side, bias = config.hidden_size, config.patch_size, config.has_bias
        self._patches = own.packed(own.tensor("patch_conv.weight", hidden, 3, side, side).flatten(1))
        self._first_norm = own.root_norm("ln_pre", hidden, EPS)
        self._layers = [_layer(config, own, index) for index in range(config.num_layers)]
        self._norm = behind.root_norm("norm", hidden, config.norm_eps)
        self._merging = _merging(config, behind)
        self._first = behind.linear(["linear_1"], width, hidden, bias=bias)
        self._second = behind.linear(["linear_2"], width, width, bias=bias)
        self._breaks = torch.cat([weights.embedding(one, config.vocab_size, width) for one in config.breaks])
        gather([self._patches, *linears_of(self._layers), self._merging, self._first, self._second])

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows of an image; see `VisionTower`."""
        config, num = self._config, rows_of(self._config.hidden_size)
        row, column = places_of(grid, config.merged)
        dim = config.hidden_size // config.num_heads
        cis = rotation_of(row, column, dim, config.theta, takes_turns=True).to(pixels.device)
        h = yield from by_rows(pixels.view(len(row), -1), num, self._entered)
        for layer in self._layers:
            yield from layer.parts(h, num, cis)
        size = config.hidden_size * config.merged**2
        tokens = yield from by_rows(h.view(-1, size), rows_of(size), self._projected)
        ends = self._breaks[:1].expand(grid[0], -1).clone()
        ends[-1] = self._breaks[1]
        return torch.cat([tokens.view(*grid, self.width), ends[:, None]], dim=1).view(-1, self.width)

    def _entered(self, patches: Tensor) -> Tensor:
        return self._first_norm.apply(ops.linear(patches, self._patches).float())

    def _projected(self, squares: Tensor) -> Tensor:
        normed = self._norm.apply(squares.reshape(-1, self._config.hidden_size)).view(squares.shape)
        merged = ops.linear(ops.linear(normed, self._merging), self._first)
        return ops.linear(ops.activate(merged, self._config.projector_activation), self._second).float()


def _merging(config: Mistral3Vision, weights: VisionWeights) -> PackedLinear:
    """Returns the matrix over squares of patches; files have its columns number by number of the hidden states."""
    hidden, each = config.hidden_size, config.merged**2
    weight = weights.tensor("patch_merger.merging_layer.weight", hidden, hidden * each)
    return weights.packed(weight.view(hidden, hidden, each).transpose(1, 2).reshape(hidden, -1))


def _layer(config: Mistral3Vision, weights: VisionWeights, index: int) -> EncoderLayer:
    hidden, inner, at = config.hidden_size, config.intermediate_size, f"transformer.layers.{index}."
    mlp = f"{at}feed_forward."
    return EncoderLayer(
        qkv=weights.linear([f"{at}attention.{one}_proj" for one in "qkv"], hidden, hidden, bias=False),
        output=weights.linear([f"{at}attention.o_proj"], hidden, hidden, bias=False),
        up=weights.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], inner, hidden, bias=False),
        down=weights.linear([f"{mlp}down_proj"], hidden, inner, bias=False),
        attention_norm=weights.root_norm(f"{at}attention_norm", hidden, EPS),
        mlp_norm=weights.root_norm(f"{at}ffn_norm", hidden, EPS),
        heads=config.num_heads,
        window=None,
        activation=config.activation,
        is_gated=True,
        is_pre_normed=True,
    )
