"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts the target's next tokens.

It reads a token together with the target's hidden states at the position before. Loads the published checkpoint layout.
Its keys and values lie in cache blocks beside the target's. So do the target's hidden states behind three of its
layers; the target's forward pass writes them. Where the target has computed none yet, the head reads its own hidden
states.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.models.config import HeadConfig, read_head_config
from sluice_server.engine.models.fields import MENDING
from sluice_server.engine.models.layers.decoder import pair_order
from sluice_server.engine.models.layers.loader import LayerLoader, Pack
from sluice_server.engine.models.model import Model, owned, token_bytes, zeros
from sluice_server.engine.models.rope import rope_table
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.kernels import ops
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import slot_width

NUM_STATES = 3  # layers of the target whose hidden states are read: low, middle, high
STATE_DTYPE = torch.bfloat16  # dtype of hidden states in the cache: enough for drafts, and every step writes them


class EagleHead:
    """The weights of one head, packed for its target's device.

    Attributes:
        behind: numbers of the target's layers behind which its hidden states are read.
    """

    def __init__(
        self,
        head: HeadConfig,
        source: Checkpoint,
        target: Model,
        num_positions: int,
        pack: Pack,
        embeddings: Callable[[], Tensor],
    ) -> None:
        """`embeddings` returns the target's, of all ids, for a head that has none of its own."""
        config = self.config = head.layer
        self.dtype, self.device, self._align = target.dtype, target.device, target.slot_align
        self.behind = head.behind or default_behind(target.num_layers)
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, size = config.hidden_size, config.intermediate_size
        loader = LayerLoader(source, target.dtype, pack)
        self._fuse = loader.linear([("fc", hidden)], NUM_STATES * hidden)
        own = source.has("embed_tokens.weight")
        shape = (config.vocab_size, hidden)
        self._embeddings = owned(source.get("embed_tokens.weight", shape)) if own else embeddings()
        norms = (loader.norm(f"midlayer.{name}", hidden) for name in ("input_layernorm", "hidden_norm"))
        # Weights of two norms: of a token's embedding and of the hidden states before it.
        self._norms = torch.stack([norm.float() for norm in norms])
        q, k, v = (f"midlayer.self_attn.{name}_proj" for name in "qkv")
        queries, keys = self._heads * self._dim, self._kv_heads * self._dim
        parts = [(q, queries), (k, keys), (v, keys)]
        orders = {q: pair_order(queries, self._dim), k: pair_order(keys, self._dim)}
        self._qkv = loader.linear(parts, 2 * hidden, orders=orders)
        self._output = loader.linear([("midlayer.self_attn.o_proj", hidden)], queries)
        norm = loader.norm("midlayer.post_attention_layernorm", hidden)
        self._mlp_norm = loader.kept(norm)
        gate_up = [("midlayer.mlp.gate_proj", size), ("midlayer.mlp.up_proj", size)]
        self._gate_up = loader.linear(gate_up, hidden, norm=norm, gated=True)
        self._down = loader.linear([("midlayer.mlp.down_proj", hidden)], size)
        norm = loader.norm("norm", hidden)
        self._norm = loader.kept(norm)
        self._head = loader.head("lm_head", (head.draft_vocab_size, hidden), norm)
        self._ids = _ids_of(source, head)
        self._cis = rope_table(config, num_positions, self.device).unsqueeze(1)
        self.num_parameters = source.num_parameters

    def token_bytes(self, cache: torch.dtype) -> int:
        """Returns the bytes per token of a `new_cache` of that dtype."""
        return (
            token_bytes(self.config, cache, self._align) + NUM_STATES * self.config.hidden_size * STATE_DTYPE.itemsize
        )

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns two tensors: keys and values as in `Model.new_cache`, and the target's hidden states.

        The second is bfloat16 [num_blocks + 1, block_size, 3 hidden].
        """
        shape = (num_blocks + 1, block_size)
        return [
            zeros((*shape, 2, self._kv_heads, slot_width(self._dim, dtype, self._align)), dtype, self.device),
            zeros((*shape, NUM_STATES * self.config.hidden_size), STATE_DTYPE, self.device),
        ]

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: list[Tensor], meta: AttentionMetadata, states: Tensor | None) -> Tensor:
        """Returns hidden states [T, hidden] (float32).

        Args:
            ids: int64 [T], the token behind each position.
            states: [T, hidden] (float32) of the head itself at the positions before, overwritten; None where the
                target's are in the cache.
        """
        if states is None:
            states = ops.linear(cache[1].flatten(0, 1)[meta.write_slots].float(), self._fuse).float()
        eps, h = self.config.norm_eps, states
        both = torch.stack((ops.embedding(ids, self._embeddings).float(), h), dim=1)
        both = ops.rms_norm(both, self._norms, eps).view(len(h), -1)
        heads = ops.linear(both, self._qkv).view(len(h), self._heads + 2 * self._kv_heads, self._dim)
        ops.rotate_and_write(heads, self._cis[meta.positions], cache[0], meta)
        mixed = ops.paged_attention(heads[:, : self._heads], cache[0], meta, self._dim**-0.5, self.config.windows[0])
        ops.linear_add_(h, mixed, self._output)
        gated = ops.linear_gated(h, self._mlp_norm, eps, self._gate_up, self.config.activation)
        ops.linear_add_(h, gated, self._down)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [R, vocab of the target] of hidden [R, hidden]; -inf for ids that it cannot propose."""
        own = ops.linear_normed(hidden, self._norm, self.config.norm_eps, self._head).float()
        if self._ids is None:
            return own
        return own.new_full((len(own), self.config.vocab_size), float("-inf")).index_copy_(1, self._ids, own)


def load_head(
    directory: Path, target: Model, num_positions: int, pack: Pack, embeddings: Callable[[], Tensor] | None = None
) -> EagleHead:
    """Reads a head's directory. Raises ServiceError MODEL_INVALID naming file and tensor."""
    config = read_head_config(directory)
    source = Checkpoint(directory, target.dtype, target.device)
    return EagleHead(config, source, target, num_positions, pack, embeddings or (lambda: target.embeddings))


def default_behind(num_layers: int) -> tuple[int, ...]:
    """Returns the layers behind which published heads read if their config does not say."""
    return (2, num_layers // 2, num_layers - 3)


def _ids_of(source: Checkpoint, head: HeadConfig) -> Tensor | None:
    """Returns the target's id of each id of the head, or None if they are the same. The file stores differences."""
    if not source.has("d2t"):
        return None
    num = head.draft_vocab_size
    found = source.integers("d2t", (num,))
    ids = found + torch.arange(num, device=found.device)
    most = head.layer.vocab_size
    if int(ids.amin()) < 0 or int(ids.amax()) >= most or len(ids.unique()) < num:
        raise source.wrong("d2t", f"does not name {num} different ids from 0 to {most - 1}: {MENDING}")
    return ids
