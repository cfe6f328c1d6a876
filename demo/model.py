"""A Llama in plain torch, for training: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

In: token ids. Out: logits. Its parameters have the names of a Hugging Face Llama checkpoint, so that exporting is
    copying. It has no cache; `engine/models` serves the exported files.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048  # tokens; also the longest sequence of training
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


TARGET = ModelShape(4096, 256, 704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64)
DRAFT = ModelShape(4096, 96, 256, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=64)
HEAD = ModelShape(4096, 256, 256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)


class Llama(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns causal logits [batch, length, vocab] (fp32) for ids [batch, length] (int64)."""
        length = ids.shape[1]
        hidden = self.model(ids, self.get_buffer("cos")[:length], self.get_buffer("sin")[:length])
        return F.linear(hidden, self.model.embed_tokens.weight)


class Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(ModelLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed


class ModelLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = ModelAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        after: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return after


class ModelAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.q_proj(hidden)), cos, sin)
        key = rotate(self.heads(self.k_proj(hidden)), cos, sin)
        value = self.heads(self.v_proj(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def heads(self, projected: Tensor) -> Tensor:
        """Reshape [batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.shape.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


def rotary_table(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [max_positions, head_dim] (fp32), halves repeated as Llama checkpoints expect."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-exponents)
    both = torch.cat((angles, angles), dim=1)
    return both.cos(), both.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def initialise(model: Llama, seed: int) -> None:
    """Set normal weights from `seed` alone; matrices that write to the residual stream start at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                spread = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())
