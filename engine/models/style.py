"""In what the supported architectures differ: each architecture's file makes the value, the shared layers read it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertStyle:
    """Names within a layer, and what its router does.

    Attributes:
        router: its projection.
        experts: before the number of one.
        gate, up, down: the projections of one.
        renormalises: whether the shares of a token's experts are made to add up to 1.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalises: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """Attributes:
    qkv_bias, output_bias: biases of the attention projections.
    mlp_bias: biases of gate, up and down.
    qk_norm: RMSNorm of each query and key head before the rotation.
    windows: per layer, the sliding window in tokens, or None.
    experts: of layers that have them; None where none has.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertStyle | None = None
