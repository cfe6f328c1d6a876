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
from sluice_server.engine.models.spans import Dim, Shape, Span, span_of
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.parallel.joined import joined_vector
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import RankSums
from sluice_server.kernels.formats.packed_weights import Packed

WHOLE = ParallelShape()
LEAST = 2  # factors are powers of 2, which round nothing; from 2^±LEAST on: others gain nothing


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelPair:
    """Two projections between which every channel is linear.

    Attributes:
        producer, consumer: their names; the producer's rows are the channels.
        rows, width: of the producer's weight.
        outputs: rows of the consumer's weight, whose inputs are heads of `dim` channels.
        repeats: consecutive heads of the consumer that read the same head of the producer.
        made, read: the rows of the producer and the inputs of the consumer that this rank measures for all ranks; None
            where it measures all by itself.
    """

    producer: str
    consumer: str
    rows: int
    width: int
    outputs: int
    dim: int
    repeats: int = 1
    made: Span | None = None
    read: Span | None = None

    def spread(self, channels: Tensor) -> Tensor:
        """Returns numbers of the producer's channels [rows] for the consumer's inputs [rows · repeats]."""
        return channels.view(-1, 1, self.dim).expand(-1, self.repeats, -1).reshape(-1)


def channel_pairs(
    config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape = WHOLE
) -> Iterator[ChannelPair]:
    """Yields the pairs of a rank's layers whose projections may be tensors of their own; `config` is of the model."""
    hidden, dim = config.hidden_size, config.head_dim
    repeats = config.num_heads // config.num_kv_heads
    heads, kv_heads = shape.heads(config), shape.kv_heads(config)
    is_owner = heads.start % repeats == 0  # of several ranks with the same key/value head, the first
    made = range(kv_heads.start, kv_heads.stop if is_owner else kv_heads.start)
    for index in shape.layers(config.num_layers):
        at = f"model.layers.{index}"
        v, o = f"{at}.self_attn.v_proj", f"{at}.self_attn.o_proj"
        rows = config.num_kv_heads * dim
        measured = (_span(made, rows // dim, dim), _span(heads, config.num_heads, dim))
        yield ChannelPair(v, o, rows, hidden, hidden, dim, repeats, *(measured if shape.tensor_size > 1 else ()))
        for up, down, size, is_shared in _inner(config, traits, index, shape):
            own = _span(shape.part(size), size)
            pair = ChannelPair(f"{at}.{up}", f"{at}.{down}", size, hidden, hidden, size)
            yield dataclasses.replace(pair, made=own, read=own) if is_shared else pair


def _inner(
    config: ModelConfig, traits: ArchitectureTraits, index: int, shape: ParallelShape
) -> Iterator[tuple[str, str, int, bool]]:
    """Yields `up` and `down` of a layer's MLP, or of a rank's experts: names, channels, whether ranks share these."""
    own, names = config.experts, traits.experts
    is_shared = shape.tensor_size > 1
    if own is None or names is None or not own.layers[index]:
        yield "mlp.up_proj", "mlp.down_proj", config.intermediate_size, is_shared
    elif names.activation != "clamped":
        for i in shape.experts(own.num):
            at = f"{names.experts}.{i}"
            yield (
                f"{at}.{names.up}",
                f"{at}.{names.down}",
                own.intermediate_size,
                is_shared and not shape.expert_parallel,
            )


def _span(part: range, whole: int, each: int = 1) -> Span:
    return Span(part.start, part.stop, whole).times(each)


class BalancedWeights:
    """A source of weights whose channel pairs are balanced. Everything else is the source's own.

    Ranks measure what they own of each pair, and share that: all divide by the same factors, which are those of a
    single rank. They must therefore ask for the producers that they share in the same order.
    """

    def __init__(self, source: WeightSource, pairs: Iterable[ChannelPair], sums: RankSums | None = None) -> None:
        """`sums`: of the ranks, which pairs with a measured part need."""
        self._source = source
        self._sums = sums
        self._producers = {pair.producer: pair for pair in pairs if _are_there(source, pair)}
        self._consumers = {pair.consumer: pair for pair in self._producers.values()}
        self._factors: dict[str, Tensor] = {}  # by producer

    def get(self, name: str, shape: Shape) -> Tensor:
        """Implements `WeightSource.get`; in the source's dtype, which is that of the layer's inputs on a GPU."""
        tensor = self._source.get(name, shape)
        projection, _, kind = name.rpartition(".")
        if projection in self._producers:
            factors = self._factors_of(self._producers[projection])[span_of(shape[0]).slice]
            return (tensor / (factors if kind == "bias" else factors[:, None])).to(tensor.dtype)
        if projection in self._consumers and kind == "weight":
            pair = self._consumers[projection]
            return (tensor * pair.spread(self._factors_of(pair))[span_of(shape[1]).slice]).to(tensor.dtype)
        return tensor

    def stored(self, name: str, rows: Dim, width: Dim) -> Packed | None:
        """Implements `WeightSource.stored`."""
        return self._source.stored(name, rows, width)

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> Sequence[Packed] | None:
        """Implements `WeightSource.stored_experts`."""
        return self._source.stored_experts(name, shape)

    def has(self, name: str) -> bool:
        """Implements `WeightSource.has`."""
        return self._source.has(name)

    def _factors_of(self, pair: ChannelPair) -> Tensor:
        found = self._factors.get(pair.producer)
        if found is None:
            made, read = self._squares(pair)
            found = channel_factors(made, read.view(-1, pair.repeats, pair.dim).sum(1).flatten())
            self._factors[pair.producer] = found
        return found

    def _squares(self, pair: ChannelPair) -> tuple[Tensor, Tensor]:
        """Returns the squared weights that make each channel, and those that read each input of the consumer."""
        inputs = pair.rows * pair.repeats
        rows, columns = pair.made or span_of(pair.rows), pair.read or span_of(inputs)
        read = self._source.get(f"{pair.consumer}.weight", (pair.outputs, columns)).float().square().sum(0)
        if pair.read is None:
            return self._source.get(f"{pair.producer}.weight", (rows, pair.width)).float().square().sum(1), read
        both = read.new_zeros(pair.rows + inputs)
        if rows.size:
            own = self._source.get(f"{pair.producer}.weight", (rows, pair.width))
            both[rows.slice] = own.float().square().sum(1)
        both[pair.rows :][columns.slice] = read
        assert self._sums is not None, "ranks that share channels share their factors"
        made, read = joined_vector(both, pair.width, self._sums).split((pair.rows, inputs))
        return made, read


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
