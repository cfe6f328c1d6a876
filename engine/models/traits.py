"""The traits in which supported architectures differ; `architectures` makes them, the shared layers read them."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTraits:
    """Tensor names of experts within a layer, and what the router does.

    Attributes:
        router: name of its projection.
        experts: prefix before an expert's number.
        gate, up, down: projections of an expert.
        renormalises: whether a token's expert weights are scaled to add up to 1.
        activation: of the gate, one of `kernels.reference.elementwise.GATES`.
        is_turned: whether a layer's experts are two weight tensors with inputs before outputs, gate and up interleaved,
            and two bias tensors; the router then has a bias too.
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
    """The traits of one architecture.

    Attributes:
        qkv_bias, output_bias: whether attention projections have biases.
        mlp_bias: whether gate, up and down have biases.
        qk_norm: whether each query and key head has an RMSNorm before the rotation.
        windows: per layer, the sliding window in tokens, or None.
        experts: of layers that have experts; None if no layer has.
        sinks: whether each head has a sink: a score for a key without a value.
        norm_offset: what norms add to their stored weights.
        post_norms: whether norms also follow attention and MLP, before their results join the residual stream.
        scales_embeddings: whether embeddings are scaled by the root of the hidden size, rounded to their dtype.
        query_scalar: scores are divided by its root; None for the head size.
        score_cap, logit_cap: attention scores, or logits, become cap · tanh(x / cap); 0 for no cap.
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
