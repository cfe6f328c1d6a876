"""The tensors of a vision tower, as packed matrices, norms and float32 vectors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.engine.models.encoders.layers import EncoderLayer, LayerNorm, RootNorm
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.spans import Span
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels.formats.linear import PackedLinear


class VisionWeights:
    """Reads the tensors below one prefix."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, pack: Pack, prefixes: Sequence[str], first: str
    ) -> None:
        """`source` gives float32; matrices are rounded to `dtype` as they are packed. `prefixes`: in which files spell
        the tower's tensors, the first of which has the tensor `first`."""
        self.prefix = next((one for one in prefixes if source.has(one + first)), prefixes[0])
        self._source, self._dtype, self._pack = source, dtype, pack

    def below(self, prefixes: Sequence[str], first: str) -> "VisionWeights":
        """Returns what reads the tensors below another prefix."""
        return VisionWeights(self._source, self._dtype, self._pack, prefixes, first)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor that is not packed; copied, as files may be overwritten while they are mapped."""
        return self._source.get(self.prefix + name, shape).clone()

    def embedding(self, token_id: int, vocab_size: int, width: int) -> Tensor:
        """Returns the text model's embedding of an id, [1, width], as that has it."""
        row = Span(token_id, token_id + 1, vocab_size)
        return self._source.get("model.embed_tokens.weight", (row, width)).to(self._dtype).float()

    def norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """Returns a norm with a bias."""
        return LayerNorm(self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size), eps)

    def root_norm(self, name: str, size: int, eps: float) -> RootNorm:
        """Returns a norm by the root of the mean square."""
        return RootNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, names: Sequence[str], rows: int, width: int, *, bias: bool = True) -> PackedLinear:
        """Returns one packed matrix of projections with `rows` rows each, stacked."""
        names = [self.prefix + name for name in names]
        weight = torch.cat([self._source.get(f"{name}.weight", (rows, width)) for name in names])
        vector = torch.cat([self._source.get(f"{name}.bias", (rows,)) for name in names]) if bias else None
        return self.packed(weight, vector)

    def packed(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Returns a packed matrix."""
        return self._pack(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))


def linears_of(layers: Sequence[EncoderLayer]) -> list[PackedLinear]:
    """Returns the matrices of layers, in the order in which they are used."""
    return [one for layer in layers for one in (layer.qkv, layer.output, layer.up, layer.down)]
