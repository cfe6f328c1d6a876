"""A torch decode step without an engine, as one would write it by hand: the yardstick of `engine_step`.

Llama with contiguous keys and values per sequence, preallocated; weights packed for BLAS (transposed,
query-key-value and gate-up concatenated, norms folded); greedy argmax on the logits.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.decoder import pair_order
from sluice_server.engine.models.layers.loader import LayerLoader
from sluice_server.engine.models.rope import rope_table
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels.formats.linear import PackedLinear, TransposedLinear


@dataclasses.dataclass(frozen=True, slots=True)
class BareLayer:
    """The packed weights [in, out] of one layer."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Transposed:
    """Packs every weight in the fastest form that torch's own operators take in float32."""

    rounds = False
    weighs = False

    def __call__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        precise: bool = False,
        importance: Tensor | None = None,
    ) -> PackedLinear:
        return TransposedLinear(weight, bias)


class BareModel:
    """A model that only decodes; `step` advances every sequence by one token."""

    def __init__(self, config: ModelConfig, source: WeightSource, num: int, length: int) -> None:
        self._config = config
        loader = LayerLoader(source, torch.float32, Transposed())
        self._layers = [self._layer(loader, i) for i in range(config.num_layers)]
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embeddings = source.get("model.embed_tokens.weight", (vocab, hidden))
        norm = loader.norm("model.norm", hidden)
        self._head = loader.linear([("lm_head", vocab)], hidden, norm=norm).weight
        self._cis = rope_table(config, config.context_length, torch.device("cpu"))
        shape = (config.num_layers, 2, num, config.num_kv_heads, length, config.head_dim)
        self._cache = torch.randn(shape) * 0.1

    def _layer(self, loader: LayerLoader, index: int) -> BareLayer:
        c, at = self._config, f"model.layers.{index}"
        q, k, v = (f"{at}.self_attn.{name}_proj" for name in "qkv")
        rows = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        size = c.intermediate_size
        return BareLayer(
            qkv=loader.linear(
                [(q, rows[0]), (k, rows[1]), (v, rows[1])],
                c.hidden_size,
                norm=loader.norm(f"{at}.input_layernorm", c.hidden_size),
                orders={q: pair_order(rows[0], c.head_dim), k: pair_order(rows[1], c.head_dim)},
            ).weight,
            output=loader.linear([(f"{at}.self_attn.o_proj", c.hidden_size)], rows[0]).weight,
            gate_up=loader.linear(
                [(f"{at}.mlp.gate_proj", size), (f"{at}.mlp.up_proj", size)],
                c.hidden_size,
                norm=loader.norm(f"{at}.post_attention_layernorm", c.hidden_size),
            ).weight,
            down=loader.linear([(f"{at}.mlp.down_proj", c.hidden_size)], size).weight,
        )

    @torch.inference_mode()
    def step(self, ids: Tensor, position: int) -> Tensor:
        """Next ids [num] of ids [num] at `position`; all earlier positions count as cached."""
        c, num = self._config, len(ids)
        h = F.embedding(ids, self._embeddings)
        cis = self._cis[position]
        for layer, cache in zip(self._layers, self._cache, strict=True):
            qkv = (self._norm(h) @ layer.qkv).view(num, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            rotated = qkv[:, : c.num_heads + c.num_kv_heads]
            torch.view_as_complex(rotated.view(*rotated.shape[:-1], -1, 2)).mul_(cis)
            cache[0, :, :, position] = qkv[:, c.num_heads : c.num_heads + c.num_kv_heads]
            cache[1, :, :, position] = qkv[:, c.num_heads + c.num_kv_heads :]
            q = qkv[:, : c.num_heads].reshape(num, c.num_kv_heads, -1, c.head_dim)
            key, value = cache[0, :, :, : position + 1], cache[1, :, :, : position + 1]
            seen = F.scaled_dot_product_attention(q, key, value).reshape(num, -1)
            h = torch.addmm(h, seen, layer.output)
            gate, up = (self._norm(h) @ layer.gate_up).chunk(2, dim=-1)
            h = torch.addmm(h, F.silu(gate).mul_(up), layer.down)
        chosen: Tensor = (self._norm(h) @ self._head).argmax(-1)
        return chosen

    def _norm(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale: Tensor = norm.mul_(norm).mul_(1.0 / x.shape[-1]).add_(self._config.norm_eps).rsqrt_()
        return x * scale
