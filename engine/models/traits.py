"""The traits in which supported architectures differ; `architectures` makes them, the shared layers read them."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTraits:
    """Tensor names of experts within a layer, and what the router does.

    Attributes:
        router: name of its projection.
        experts: prefix before an expert's number.
        gate, up, down: projections of an expert.
        renormalises: whether a token's expert weights are scaled to add up to 1.
        activation: of the gate, one of `kernels.reference.elementwise.GATES`.
        shared, shared_gate: names of an expert that every token goes through, and of the projection whose sigmoid
            weights its output; empty without.
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
    shared: str = ""
    shared_gate: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """The traits of one architecture.

    Attributes:
        qkv_bias, output_bias: whether attention projections have biases.
        mlp_bias: whether gate, up and down have biases.
        qk_norm: whether each query and key head has an RMSNorm before the rotation.
        norms_all_heads: whether that is one norm of all query heads and one of all key heads.
        is_fused: whether qkv_proj and gate_up_proj are one tensor each, not a tensor for each projection.
        rotated: per layer, whether queries and keys are rotated; empty for all.
        is_partly_rotated: whether only a part of each head may be rotated, as the config says.
        windows: per layer, the sliding window in tokens, or None.
        experts: of layers that have experts; None if no layer has.
        sinks: whether each head has a sink: a score for a key without a value.
        norm_offset: what norms add to their stored weights.
        pre_norms: whether norms precede attention and MLP.
        post_norms: whether norms also follow attention and MLP, before their results join the residual stream.
        embedding_scale: the factor of embeddings, rounded to their dtype.
        residual_scale: the factor of what joins the residual stream; not with `qk_norm` or `post_norms`.
        score_scale: the factor of attention scores; None for 1 / root of the head size.
        logit_scale: the factor of logits.
        score_cap, logit_cap: attention scores, or logits, become cap · tanh(x / cap); 0 for no cap.
        attention: what computes attention in all layers, a `PagedAttention`; None for the kernels' own. Untyped here,
            where nothing may depend on torch.
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
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
    norms_all_heads: bool = False
    is_fused: bool = False
    rotated: tuple[bool, ...] = ()
    is_partly_rotated: bool = False
    pre_norms: bool = True
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for traits that exclude one another."""
        if self.residual_scale != 1.0 and (self.qk_norm or self.post_norms or not self.pre_norms):
            raise ValueError("residual_scale is built for norms before attention and MLP alone")
        if not self.pre_norms and (self.experts is not None or not self.post_norms):
            raise ValueError("without pre_norms there must be post_norms, and no experts")
