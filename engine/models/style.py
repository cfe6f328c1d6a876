"""In what the supported architectures differ: each architecture's file makes the value, the shared layers read it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """Attributes:
    qkv_bias, output_bias: biases of the attention projections.
    mlp_bias: biases of gate, up and down.
    qk_norm: RMSNorm of each query and key head before the rotation.
    windows: per layer, the sliding window in tokens, or None.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
