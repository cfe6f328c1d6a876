"""Moves scale from inner channels that stand out into the weights behind them, where weights are going to be rounded.

Values go through attention's output projection, and `up` through `down`, without anything between that is not linear in
a channel. A channel may therefore be divided by a factor where it is made and multiplied where it is read: the model's
function stays the same (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438). A channel far larger than its neighbours
would take the scale that they are rounded with.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels.formats.packed_weights import Packed

LEAST = 2  # factors are powers of 2, which round nothing; from 2^±LEAST on: others gain nothing


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelPair:
    """Two projections between which every channel is linear.

    Attributes:
        producer, consumer: their names; the producer's rows are the channels.
        rows, width: of the producer's weight.
        outputs: rows of the consumer's weight, whose inputs are heads of `dim` channels.
        repeats: consecutive heads of the consumer that read the same head of the producer.
    """

    producer: str
    consumer: str
    rows: int
    width: int
    outputs: int
    dim: int
    repeats: int = 1

    def spread(self, channels: Tensor) -> Tensor:
        """Returns numbers of the producer's channels [rows] for the consumer's inputs [rows · repeats]."""
        return channels.view(-1, 1, self.dim).expand(-1, self.repeats, -1).reshape(-1)


def channel_pairs(config: ModelConfig, traits: ArchitectureTraits) -> Iterator[ChannelPair]:
    """Yields the pairs of all layers whose projections may be tensors of their own."""
    hidden, dim = config.hidden_size, config.head_dim
    repeats = config.num_heads // config.num_kv_heads
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        v, o = f"{at}.self_attn.v_proj", f"{at}.self_attn.o_proj"
        yield ChannelPair(v, o, config.num_kv_heads * dim, hidden, hidden, dim, repeats)
        for up, down, size in _inner(config, traits, index):
            yield ChannelPair(f"{at}.{up}", f"{at}.{down}", size, hidden, hidden, size)


def _inner(config: ModelConfig, traits: ArchitectureTraits, index: int) -> Iterator[tuple[str, str, int]]:
    """Yields the names of `up` and `down` of a layer's MLP, or of its experts, and their inner channels."""
    own, names = config.experts, traits.experts
    if own is None or names is None or not own.layers[index]:
        yield "mlp.up_proj", "mlp.down_proj", config.intermediate_size
    elif names.activation != "clamped":
        for i in range(own.num):
            yield f"{names.experts}.{i}.{names.up}", f"{names.experts}.{i}.{names.down}", own.intermediate_size


class BalancedWeights:
    """A source of weights whose channel pairs are balanced. Everything else is the source's own."""

    def __init__(self, source: WeightSource, pairs: Iterable[ChannelPair]) -> None:
        self._source = source
        self._producers = {pair.producer: pair for pair in pairs if _are_there(source, pair)}
        self._consumers = {pair.consumer: pair for pair in self._producers.values()}
        self._factors: dict[str, Tensor] = {}  # by producer

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Implements `WeightSource.get`."""
        tensor = self._source.get(name, shape)
        projection, _, kind = name.rpartition(".")
        if projection in self._producers:
            factors = self._factors_of(self._producers[projection])
            return tensor / (factors if kind == "bias" else factors[:, None])
        if projection in self._consumers and kind == "weight":
            pair = self._consumers[projection]
            return tensor * pair.spread(self._factors_of(pair))
        return tensor

    def stored(self, name: str, rows: int, width: int) -> Packed | None:
        """Implements `WeightSource.stored`."""
        return self._source.stored(name, rows, width)

    def stored_experts(self, name: str, shape: tuple[int, int, int]) -> Sequence[Packed] | None:
        """Implements `WeightSource.stored_experts`."""
        return self._source.stored_experts(name, shape)

    def has(self, name: str) -> bool:
        """Implements `WeightSource.has`."""
        return self._source.has(name)

    def _factors_of(self, pair: ChannelPair) -> Tensor:
        found = self._factors.get(pair.producer)
        if found is None:
            made = self._source.get(f"{pair.producer}.weight", (pair.rows, pair.width))
            read = self._source.get(f"{pair.consumer}.weight", (pair.outputs, pair.rows * pair.repeats))
            found = self._factors[pair.producer] = channel_factors(
                made.float().square().sum(1),
                read.float().square().sum(0).view(-1, pair.repeats, pair.dim).sum(1).flatten(),
            )
        return found


def _are_there(source: WeightSource, pair: ChannelPair) -> bool:
    return all(source.has(f"{name}.weight") for name in (pair.producer, pair.consumer))


def channel_factors(made: Tensor, read: Tensor) -> Tensor:
    """Returns what each channel is divided by, float32 [C], from the squared weights that make and that read it.

    It leaves both sides of a channel that stands out equally far from the middle channel.
    """
    ratio = (made / read).clamp(1e-30, 1e30).nan_to_num(1.0)
    ratio = torch.where((made > 0) & (read > 0), ratio, ratio.median())
    exponents = (ratio / ratio.median()).log2().div(4).round()  # of the fourth root: squares, and half of the way
    return torch.exp2(torch.where(exponents.abs() < LEAST, 0.0, exponents))
