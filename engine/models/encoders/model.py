"""A loaded encoder: token ids of whole inputs in, hidden states and classes out. It keeps nothing between steps."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.encoders.families import BIASES, POSITIONS, TYPES
from sluice_server.engine.models.encoders.layers import AttentionInputs, EncoderInputs, EncoderWeights
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.rope import rope_table
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.engine.request import Pooling
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import gather
from sluice_server.kernels.formats.packer import PLAIN


class EncoderInput(NamedTuple):
    """One input: its token ids, and how many of them are of the first of two texts; None where there is one text."""

    ids: Sequence[int]
    num_first: int | None = None


class Encoder:
    """The weights of one encoder, packed for one device.

    Attributes:
        kernel: name of the kernel that multiplies.
        layers_done: number of layers computed since start.
        on_layer: called after each computed layer.
    """

    def __init__(self, weights: EncoderWeights, num_positions: int, device: torch.device) -> None:
        config, encoder, family = weights.config, weights.encoder, weights.family
        self.config, self.device = config, device
        self.num_parameters = 0  # set by `load_encoder`
        self.layers_done = 0
        self.on_layer: Callable[[], None] = _nothing
        self._encoder = encoder
        self._words = weights.table(family.words, config.vocab_size)
        self._positions = weights.table(POSITIONS, encoder.num_positions) if encoder.num_positions else None
        self._types = weights.table(TYPES, encoder.num_types) if encoder.num_types else None
        self._norm = weights.norm(family.embedding_norm)
        self._biases = weights.biases(BIASES) if encoder.num_buckets else None
        ropes = (config.rope, config.local_rope) if config.local_rope is not None else ()
        self._cis = [rope_table(config, num_positions, device, rope) for rope in ropes]
        self._layers = [weights.layer(index) for index in range(config.num_layers)]
        self._final_norm = weights.norm(family.final_norm) if family.final_norm else None
        self._head = ClassificationHead(weights) if config.labels is not None else None
        gather(linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.up, layer.down))
        self.kernel = self._layers[0].qkv.kernel

    @torch.inference_mode()
    def forward(self, given: Sequence[EncoderInput]) -> list[Tensor]:
        """Returns the hidden states of each input, float32 [its tokens, hidden]."""
        inputs = self._inputs(given)
        h = self._embed(inputs)
        attention = [AttentionInputs(inputs.ends, cis[inputs.positions]) for cis in self._cis]
        plain = AttentionInputs(inputs.ends, bias=self._bias(inputs.ends))
        for layer in self._layers:
            h = layer.forward(h, attention[layer.window is not None] if attention else plain)
            self.layers_done += 1
            self.on_layer()
        if self._final_norm is not None:
            h = self._final_norm.apply(h)
        return list(h.split([len(one.ids) for one in given]))

    @torch.inference_mode()
    def pooled(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        """Returns the vector, float32, of an input with these hidden states [its tokens, hidden]."""
        match pooling:
            case Pooling.FIRST:
                return hidden[0]
            case Pooling.LAST:
                return hidden[-1]
            case Pooling.MEAN:
                return hidden.mean(0)
            case Pooling.CLASSES:
                assert self._head is not None, "the gateway asks models with such a head only"
                return self._head.classes(self.pooled(hidden, self._encoder.head_pooling))

    def _inputs(self, given: Sequence[EncoderInput]) -> EncoderInputs:
        ids = [torch.tensor(one.ids, dtype=torch.int64) for one in given]
        positions = torch.cat([self._places(one) for one in ids])
        types = torch.cat([_types(one) for one in given]) if self._encoder.num_types > 1 else None
        ends = list(itertools.accumulate(len(one.ids) for one in given))
        on = self.device
        return EncoderInputs(torch.cat(ids).to(on), positions.to(on), None if types is None else types.to(on), ends)

    def _places(self, ids: Tensor) -> Tensor:
        """Returns the rows of an input's tokens in the table of positions."""
        pad = self._encoder.pad_id
        if pad is None:
            return torch.arange(len(ids))
        counts = ids != pad
        return counts.cumsum(0) * counts + pad

    def _embed(self, inputs: EncoderInputs) -> Tensor:
        """Returns the normed embeddings, float32 [T, hidden]."""
        h = ops.embedding(inputs.ids, self._words).float()
        if self._types is not None:
            h += self._types[0] if inputs.types is None else self._types[inputs.types]
        if self._positions is not None:
            h += self._positions[inputs.positions]
        return self._norm.apply(h)

    def _bias(self, ends: Sequence[int]) -> Tensor | None:
        """Returns the biases of distances [heads, L, L] for the longest input."""
        if self._biases is None:
            return None
        longest = max(end - start for start, end in itertools.pairwise((0, *ends)))
        buckets = ops.distance_buckets(longest, len(self._biases), self.device)
        return self._biases[buckets].permute(2, 0, 1).contiguous()


class ClassificationHead:
    """A dense layer with its activation and maybe a norm, then a number for each class; in float32."""

    def __init__(self, weights: EncoderWeights) -> None:
        config, names = weights.config, weights.family.head
        assert config.labels is not None
        hidden = config.hidden_size
        self._dense = weights.plain(names.dense, hidden, bias=weights.encoder.head_bias, is_inside=names.is_inside)
        self._norm = weights.norm(names.norm, is_inside=False) if names.norm else None
        self._classes = weights.plain(names.classes, len(config.labels.names), bias=True, is_inside=False)
        self._activation = weights.encoder.head_activation

    def classes(self, pooled: Tensor) -> Tensor:
        """Returns a number for each class, float32, of what is pooled [hidden]."""
        found = ops.activate(F.linear(pooled[None], *self._dense), self._activation)
        found = found if self._norm is None else self._norm.apply(found)
        return F.linear(found, *self._classes)[0]


def load_encoder(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    pack: Pack = PLAIN,
) -> Encoder:
    """Reads a checkpoint's weights. Raises ServiceError naming file and tensor."""
    source = Checkpoint(directory, torch.float32, device)
    model = Encoder(EncoderWeights(config, source, dtype, pack), num_positions, device)
    model.num_parameters = source.num_parameters
    return model


def _types(one: EncoderInput) -> Tensor:
    """Returns the token types of an input: 0 in the first text, 1 in the second."""
    found = torch.zeros(len(one.ids), dtype=torch.int64)
    if one.num_first is not None:
        found[one.num_first :] = 1
    return found


def _nothing() -> None:
    """Does nothing: the default of `on_layer`."""
