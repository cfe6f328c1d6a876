"""A decoder layer, by the one call of our own CPU kernels or operation by operation.

Takes what `engine.models.layers.layer` describes. Knows nothing of models' names or of batching.
"""

from torch import Tensor

from engine.models.layers.layer import Layer, forward_, is_one_call
from kernels import ops
from kernels.layout.metadata import AttentionMetadata


def decoder_layer_(
    h: Tensor, layer: Layer, cis: Tensor, cache: Tensor, meta: AttentionMetadata, kept: Tensor | None = None
) -> None:
    """h [T or more, hidden] (float32) through a layer in place: h += attention(norm(h)); h += mlp(norm(h)). Writes the
    step's keys and values; cis and cache as of `rotate_and_write`. `kept`, int64 and ascending: the only tokens wanted
    behind it, whose rows are then the first. Batch-invariant where all of its operations are."""
    if is_one_call(layer, h, cache):
        forward_(h, layer, cis, cache, meta, kept)
        return
    heads = ops.linear_normed(h, layer.attention_norm, layer.eps, layer.qkv)
    heads = heads.view(len(h), layer.heads + 2 * layer.kv_heads, layer.dim)
    if layer.head_norms is not None:
        normed = heads[:, : layer.heads + layer.kv_heads]
        normed.copy_(ops.rms_norm(normed.float(), layer.head_norms, layer.eps))
    ops.rotate_and_write(heads, cis, cache, meta)
    queries, options = heads[:, : layer.heads], (layer.scale, layer.window, layer.score_cap, layer.sinks)
    seen = ops.paged_attention(queries, cache, meta, *options, is_fixed=layer.is_fixed)
    ops.linear_add_(h, seen, layer.output, layer.output_norm, layer.eps)
    layer.mlp.add_to(h, layer.eps)
    if kept is not None:
        h[: len(kept)] = h[kept]
