"""The models that the CPU benchmark runs: random checkpoints of a few shapes, written where a cache may lie.

In comes a shape's name, out a checkpoint directory that any server of Hugging Face models reads. Peers that read other
files make them from the same shape.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

CACHE = Path(os.environ.get("SLUICE_BENCH_CACHE", Path.home() / ".cache" / "sluice")) / "bench"
CONTEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder, in the words of config.json."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool


SHAPES = {
    "6.5M": Shape("LlamaForCausalLM", "llama", 256, 704, 6, 4, 2, 64, 8192, False),
    "61M": Shape("LlamaForCausalLM", "llama", 768, 2048, 6, 12, 4, 64, 16384, False),
    "135M": Shape("LlamaForCausalLM", "llama", 576, 1536, 30, 9, 3, 64, 49152, True),  # SmolLM2-135M's
    "474M": Shape("Qwen3ForCausalLM", "qwen3", 1024, 3072, 28, 16, 8, 128, 32768, True),
}


def checkpoint(name: str) -> Path:
    """The directory of a shape's checkpoint in bfloat16, written when it is first asked for."""
    directory, shape = CACHE / name, SHAPES[name]
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        tensors = {key: _values(size) for key, size in tensors_of(shape)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config(shape), indent=2))
    return directory


def lengthened(name: str, context: int) -> Path:
    """The directory of a shape's checkpoint, for contexts of so many tokens."""
    directory, weights = CACHE / f"{name}-{context}", checkpoint(name)
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.safetensors").unlink(missing_ok=True)
        os.link(weights / "model.safetensors", directory / "model.safetensors")
        fields = {**config(SHAPES[name]), "max_position_embeddings": context}
        (directory / "config.json").write_text(json.dumps(fields, indent=2))
    return directory


def config(shape: Shape) -> dict[str, object]:
    """config.json of a shape."""
    fields = dataclasses.asdict(shape)
    return {
        "architectures": [fields.pop("architecture")],
        **fields,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor."""
    hidden, size, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_hidden_layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        if shape.model_type == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", (dim,)
            yield f"{at}.self_attn.k_norm.weight", (dim,)
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", (size, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, size)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _values(size: tuple[int, ...]) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    spread: float = size[-1] ** -0.5
    return torch.randn(size).mul_(spread).bfloat16()
