"""Vision towers of CLIP's form (Radford et al. 2021), and SigLIP's (Zhai et al. 2023): images of one size."""

from collections.abc import Generator

import torch
from torch import Tensor

from sluice_server.engine.models.encoders.layers import EncoderLayer
from sluice_server.engine.models.vision.clip_config import ClipConfig
from sluice_server.engine.models.vision.encoding import Parts, rows_of
from sluice_server.engine.models.vision.weights import VisionWeights, linears_of
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear

PREFIXES = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
FIRST = "embeddings.patch_embedding.weight"


class ClipTower:
    """The layers of a tower."""

    def __init__(self, config: ClipConfig, weights: VisionWeights, num_layers: int) -> None:
        """`num_layers`: that are computed."""
        self.config = config
        hidden = config.hidden_size
        self._patches = _patches(config, weights)
        self._class = weights.tensor("embeddings.class_embedding", hidden) if config.is_clip else None
        self._positions = weights.tensor("embeddings.position_embedding.weight", config.num_positions, hidden)
        eps = config.norm_eps
        self._norm = weights.norm("pre_layrnorm", hidden, eps) if config.is_clip else None  # spelled so in every file
        self._layers = [_layer(config, weights, index) for index in range(num_layers)]

    @property
    def linears(self) -> list[PackedLinear]:
        """The matrices, in the order in which they are used."""
        return [self._patches, *linears_of(self._layers)]

    def parts(self, pixels: Tensor) -> Parts:
        """Computes the hidden states [positions, hidden], the class token's first, if there is one."""
        h = ops.linear(self._split(pixels), self._patches).float()
        if self._class is not None:
            h = torch.cat([self._class[None], h])
        h = h + self._positions
        h = h if self._norm is None else self._norm.apply(h)
        h = h.contiguous()
        yield from self._through(h)
        return h

    def _through(self, h: Tensor) -> Generator[None, None, None]:
        for layer in self._layers:
            yield from layer.parts(h, rows_of(self.config.hidden_size))

    def _split(self, pixels: Tensor) -> Tensor:
        """Returns the patches, row by row, each with its channels one after the other [patches, 3 · side²]."""
        side, (rows, columns) = self.config.patch_size, self.config.patches
        parts = pixels.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
        return parts.reshape(rows * columns, 3 * side * side)


def _patches(config: ClipConfig, weights: VisionWeights) -> PackedLinear:
    """Returns the convolution over patches as a product: no two patches overlap."""
    side, name = config.patch_size, "embeddings.patch_embedding"
    weight = weights.tensor(f"{name}.weight", config.hidden_size, 3, side, side).flatten(1)
    return weights.packed(weight, None if config.is_clip else weights.tensor(f"{name}.bias", config.hidden_size))


def _layer(config: ClipConfig, weights: VisionWeights, index: int) -> EncoderLayer:
    hidden, inner, at = config.hidden_size, config.intermediate_size, f"encoder.layers.{index}."
    return EncoderLayer(
        qkv=weights.linear([f"{at}self_attn.{one}_proj" for one in "qkv"], hidden, hidden),
        output=weights.linear([f"{at}self_attn.out_proj"], hidden, hidden),
        up=weights.linear([f"{at}mlp.fc1"], inner, hidden),
        down=weights.linear([f"{at}mlp.fc2"], hidden, inner),
        attention_norm=weights.norm(f"{at}layer_norm1", hidden, config.norm_eps),
        mlp_norm=weights.norm(f"{at}layer_norm2", hidden, config.norm_eps),
        heads=config.num_heads,
        window=None,
        activation=config.activation,
        is_gated=False,
        is_pre_normed=True,
    )
