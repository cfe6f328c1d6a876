"""The part of a model's configuration that only encoders have. Depends on the standard library only."""

import dataclasses

from sluice_server.engine.request import Pooling


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The configuration of an encoder, besides that of any transformer.

    Attributes:
        family: key of `families.FAMILIES`.
        num_positions: rows of the table of positions; 0 where positions are rotated.
        first_position: row of an input's first token.
        pad_id: id whose tokens take no position of their own; None where all tokens are counted.
        num_types: token types with an embedding; 0 where the model has none.
        num_buckets: distances with a bias of their own in attention; 0 without such biases.
        norm_bias: whether norms have a bias.
        head_activation, head_bias: of the dense layer before the classes.
        head_pooling: what the classification head reads.
    """

    family: str
    num_positions: int = 0
    first_position: int = 0
    pad_id: int | None = None
    num_types: int = 0
    num_buckets: int = 0
    norm_bias: bool = True
    head_activation: str = "tanh"
    head_bias: bool = True
    head_pooling: Pooling = Pooling.FIRST
