"""In what the supported architectures differ: each architecture's file makes the value, the shared layers read it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """Attributes:
    qkv_bias, output_bias: biases of the attention projections.
    mlp_bias: biases of gate, up and down.
    qk_norm: RMSNorm of each query and key head before the rotation.
    windows: per layer, the sliding window in tokens, or None.
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
    norm_offset: float = 0.0
    post_norms: bool = False
    scales_embeddings: bool = False
    query_scalar: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
