"""An EAGLE-3 head in plain torch, for training (Li et al. 2025, arXiv 2503.01840): one layer that drafts tokens.

In: hidden states of the target behind three of its layers, and the tokens that follow them. Out: logits over the most
    common ids. Parameters have the names of published checkpoints, so that exporting is copying. It has no cache;
    `engine/models` serves the exported file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice_server.demo.model import FeedForward, Llama, ModelShape, rotary_table, rotate

BEHIND = (1, 3, 4)  # layers of the target, counted from 1, whose outputs are read: low, middle, high
NUM_IDS = 3072  # size of the draft vocabulary, which covers 97.7 % of the corpus


class Head(nn.Module):
    """The head. `shape`: of its one layer; `ids`: int64 [draft vocabulary], ascending, the target's id of each draft
    id."""

    def __init__(self, shape: ModelShape, target: Llama, ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(BEHIND) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = Fixed(target.model.embed_tokens.weight.detach()[ids])
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True))
        self.register_buffer("embeddings", target.model.embed_tokens.weight.detach(), persistent=False)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor, following: Tensor, num: int) -> list[Tensor]:
        """Returns logits [batch, length, draft vocabulary] of `num` drafts; the k-th from a state k - 1 drafts old.

        Args:
            features: [batch, length, 3 hidden], the target's hidden states at each position.
            following: int64 [batch, length], the token behind each position.
        """
        length = following.shape[1]
        tokens = F.embedding(following, self.get_buffer("embeddings"))
        hidden, found = self.fc(features), []
        seen = DraftCache(self.get_buffer("cos")[:length], self.get_buffer("sin")[:length])
        for _ in range(num):
            hidden = self.midlayer(tokens, hidden, seen)
            found.append(F.linear(self.norm(hidden), self.lm_head.get_buffer("weight")))
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))  # used instead of the next position's features
        return found


class Fixed(nn.Module):
    """A matrix that is not trained."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)


class DraftCache:
    """Keys and values of each draft so far, and the rotary tables of the positions."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class MidLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, tokens: Tensor, hidden: Tensor, seen: DraftCache) -> Tensor:
        both = torch.cat((self.input_layernorm(tokens), self.hidden_norm(hidden)), dim=2)
        hidden = hidden + self.self_attn(both, seen)
        after: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return after


class HeadAttention(nn.Module):
    """Attention of the head. For the first draft it is causal. A later draft, `age` drafts on, reads the first
    draft's keys up to `age` positions before its own, then those of its ancestors."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.groups = shape.num_heads // shape.num_kv_heads
        self.q_proj = nn.Linear(2 * shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, both: Tensor, seen: DraftCache) -> Tensor:
        query = rotate(self.heads(self.q_proj(both)), seen.cos, seen.sin)
        seen.keys.append(rotate(self.heads(self.k_proj(both)), seen.cos, seen.sin).repeat_interleave(self.groups, 1))
        seen.values.append(self.heads(self.v_proj(both)).repeat_interleave(self.groups, 1))
        age, length = len(seen.keys) - 1, query.shape[2]
        if not age:
            mixed = F.scaled_dot_product_attention(query, seen.keys[0], seen.values[0], is_causal=True)
        else:
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - age).to(query.device)
            scores = (query @ seen.keys[0].transpose(2, 3)).masked_fill(hidden, float("-inf"))
            keys = [shifted(key, age - i) for i, key in enumerate(seen.keys[1:], 1)]
            values = [shifted(value, age - i) for i, value in enumerate(seen.values[1:], 1)]
            own = torch.stack([(query * key).sum(3) for key in keys], dim=3)
            shares = (torch.cat((scores, own), dim=3) * self.dim**-0.5).softmax(dim=3)
            mixed = shares[..., :length] @ seen.values[0]
            for i, value in enumerate(values):
                mixed = mixed + shares[..., length + i, None] * value
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def heads(self, projected: Tensor) -> Tensor:
        """Reshape [batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.dim).transpose(1, 2)


def shifted(states: Tensor, num: int) -> Tensor:
    """Shift [batch, heads, length, head_dim] by `num` positions to later ones; the first `num` become zero."""
    return F.pad(states[:, :, : states.shape[2] - num], (0, 0, num, 0))


def features_of(target: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns hidden states [batch, length, 3 hidden] behind the layers `BEHIND`, and logits; ids: [batch, length]."""
    cos, sin = target.get_buffer("cos")[: ids.shape[1]], target.get_buffer("sin")[: ids.shape[1]]
    hidden, found = target.model.embed_tokens(ids), []
    for num, layer in enumerate(target.model.layers, 1):
        hidden = layer(hidden, cos, sin)
        if num in BEHIND:
            found.append(hidden)
    return torch.cat(found, dim=2), F.linear(target.model.norm(hidden), target.model.embed_tokens.weight)


def initialise_head(head: Head, seed: int) -> None:
    """Initialise like the target, except that `fc` starts by passing on the highest hidden state."""
    generator = torch.Generator().manual_seed(seed)
    size = head.shape.hidden_size
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
        head.fc.weight.zero_()
        head.fc.weight[:, -size:].copy_(torch.eye(size))


def common_ids(stream: Tensor, vocab_size: int) -> Tensor:
    """Returns the `NUM_IDS` most common ids of a stream, ascending: int64."""
    counts = torch.bincount(stream, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:NUM_IDS].sort().values
