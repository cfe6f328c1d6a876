"""In what the supported architectures differ: each architecture's file makes the value, the shared layers read it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTraits:
    """Names within a layer, and what its router does.

    Attributes:
        router: its projection.
        experts: before the number of one.
        gate, up, down: the projections of one.
        renormalises: whether the shares of a token's experts are made to add up to 1.
        activation: of the gate, one of `kernels.reference.elementwise.GATES`.
        is_turned: whether experts are two tensors of weights with inputs before outputs, gate and up alternating, and
            two of biases; the router has a bias, too, then.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalises: bool = False
    activation: str = "silu"
    is_turned: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """Attributes:
    qkv_bias, output_bias: biases of the attention projections.
    mlp_bias: biases of gate, up and down.
    qk_norm: RMSNorm of each query and key head before the rotation.
    windows: per layer, the sliding window in tokens, or None.
    experts: of layers that have them; None where none has.
    sinks: a score of each head for a key without a value.
    norm_offset: what norms add to their weights as they are stored.
    post_norms: norms behind attention and MLP, too, before their results join the residual stream.
    scales_embeddings: by the root of the hidden size, rounded to their dtype.
    query_scalar: scores are divided by its root; None for the head size.
    score_cap, logit_cap: scores, and the logits at the end, become cap · tanh(x / cap); 0 for as they are.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertTraits | None = None
    sinks: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    scales_embeddings: bool = False
    query_scalar: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
