"""A vision tower and its projector: pixels of an image in, rows in the place of its tokens' embeddings out.

It keeps nothing between images, and the rows of an image do not depend on others: each is computed alone.
"""

from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.models.encoders.layers import EncoderLayer, LayerNorm
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.vision.config import VisionConfig
from sluice_server.engine.models.weights import Checkpoint, WeightSource
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear, gather
from sluice_server.kernels.formats.packer import PLAIN

TOWERS = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
WORK = (
    1 << 16
)  # numbers of hidden states in a part: 64 rows of 1,024, of which 24 layers took 10 ms a part on two cores
LEAST_ROWS = 16
PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")


class VisionTower:
    """The weights of one tower and its projector, packed for one device.

    Attributes:
        config: what the checkpoint says of both.
    """

    def __init__(self, config: VisionConfig, weights: "VisionWeights", width: int) -> None:
        """`width`: of the rows, the text model's hidden size."""
        self.config = config
        hidden = config.hidden_size
        self._patches = weights.patches()
        self._class = weights.vector("embeddings.class_embedding", hidden) if config.is_clip else None
        self._positions = weights.matrix("embeddings.position_embedding.weight", (config.num_positions, hidden))
        self._norm = weights.norm("pre_layrnorm") if config.is_clip else None  # spelled so in every file
        self._layers = [weights.layer(index) for index in range(config.num_layers)]
        self._projector = [weights.projector(1, width, hidden), weights.projector(2, width, width)]
        packed = [one for layer in self._layers for one in (layer.qkv, layer.output, layer.up, layer.down)]
        gather([self._patches, *packed, *self._projector])

    def encode(self, pixels: Tensor) -> Tensor:
        """Returns the rows, float32 [tokens, width], of an image's pixels, float32 [3, side, side], normalised."""
        encoding = self.begin(pixels)
        while not encoding.advance():
            pass
        assert encoding.rows is not None
        return encoding.rows

    def begin(self, pixels: Tensor) -> "Encoding":
        """Begins to encode an image."""
        return Encoding(self._parts(pixels))

    def _parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Computes the rows of an image in parts of about as much work each, and returns them at the end. The parts of
        an image are always the same, and so are its bits."""
        h = ops.linear(self._split(pixels.to(self._positions.device)), self._patches).float()
        if self._class is not None:
            h = torch.cat([self._class[None], h])
        h = h + self._positions
        h = h if self._norm is None else self._norm.apply(h)
        h = h.contiguous()
        num = max(LEAST_ROWS, WORK // self.config.hidden_size)
        for layer in self._layers:
            yield from layer.parts(h, num)
        if self._class is not None and not self.config.keeps_class:
            h = h[1:].contiguous()
        first, second = self._projector
        return ops.linear(ops.activate(ops.linear(h, first), self.config.projector_activation), second).float()

    def _split(self, pixels: Tensor) -> Tensor:
        """Returns the patches, row by row, each with its channels one after the other [patches, 3 · side²]."""
        side = self.config.patch_size
        num = self.config.image_size // side
        parts = pixels.view(3, num, side, num, side).permute(1, 3, 0, 2, 4)
        return parts.reshape(num * num, 3 * side * side)


class Encoding:
    """An image that is being encoded, part by part.

    Attributes:
        rows: float32 [tokens, width]; None until all parts are computed.
    """

    def __init__(self, parts: Generator[None, None, Tensor]) -> None:
        self.rows: Tensor | None = None
        self._parts = parts

    def advance(self) -> bool:
        """Computes the next part; returns whether it was the last."""
        try:
            with torch.inference_mode():
                next(self._parts)
        except StopIteration as end:
            self.rows = end.value
        return self.rows is not None


class VisionWeights:
    """The tensors of a tower and its projector, as packed matrices and float32 vectors."""

    def __init__(self, config: VisionConfig, source: WeightSource, dtype: torch.dtype, pack: Pack) -> None:
        """`source` gives float32; matrices are rounded to `dtype` as they are packed."""
        self._config, self._source, self._dtype, self._pack = config, source, dtype, pack
        first = "embeddings.patch_embedding.weight"
        self._tower = next((prefix for prefix in TOWERS if source.has(prefix + first)), TOWERS[0])
        self._behind = next((one for one in PROJECTORS if source.has(f"{one}linear_1.weight")), PROJECTORS[0])

    def vector(self, name: str, size: int) -> Tensor:
        """Returns a vector of the tower."""
        return self._source.get(self._tower + name, (size,)).clone()

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Returns a matrix that is not packed; copied, as files may be overwritten while they are mapped."""
        return self._source.get(self._tower + name, shape).clone()

    def norm(self, name: str) -> LayerNorm:
        """Returns a norm of the tower."""
        size, eps = self._config.hidden_size, self._config.norm_eps
        return LayerNorm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size), eps)

    def patches(self) -> PackedLinear:
        """Returns the convolution over patches as a product: no two patches overlap."""
        config, side = self._config, self._config.patch_size
        name = f"{self._tower}embeddings.patch_embedding"
        weight = self._source.get(f"{name}.weight", (config.hidden_size, 3, side, side)).flatten(1)
        bias = None if config.is_clip else self._source.get(f"{name}.bias", (config.hidden_size,))
        return self._packed(weight, bias)

    def layer(self, index: int) -> EncoderLayer:
        """Returns a layer."""
        config, at = self._config, f"{self._tower}encoder.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        return EncoderLayer(
            qkv=self._linear([f"{at}self_attn.{one}_proj" for one in "qkv"], hidden, hidden),
            output=self._linear([f"{at}self_attn.out_proj"], hidden, hidden),
            up=self._linear([f"{at}mlp.fc1"], inner, hidden),
            down=self._linear([f"{at}mlp.fc2"], hidden, inner),
            attention_norm=self.norm(f"encoder.layers.{index}.layer_norm1"),
            mlp_norm=self.norm(f"encoder.layers.{index}.layer_norm2"),
            heads=config.num_heads,
            window=None,
            activation=config.activation,
            is_gated=False,
            is_pre_normed=True,
        )

    def projector(self, num: int, rows: int, width: int) -> PackedLinear:
        """Returns matrix `num` of the projector, from 1."""
        return self._linear([f"{self._behind}linear_{num}"], rows, width, bias=self._config.projector_bias)

    def _linear(self, names: Sequence[str], rows: int, width: int, *, bias: bool = True) -> PackedLinear:
        """Returns one packed matrix of projections with `rows` rows each, stacked."""
        weight = torch.cat([self._source.get(f"{name}.weight", (rows, width)) for name in names])
        return self._packed(
            weight, torch.cat([self._source.get(f"{name}.bias", (rows,)) for name in names]) if bias else None
        )

    def _packed(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._pack(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))


def load_vision(
    directory: Path,
    config: VisionConfig,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack = PLAIN,
) -> VisionTower:
    """Reads a checkpoint's tower and projector; `width` is the text model's hidden size.

    Raises ServiceError naming file and tensor.
    """
    return VisionTower(config, VisionWeights(config, Checkpoint(directory, torch.float32, device), dtype, pack), width)
