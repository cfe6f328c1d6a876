"""Random EAGLE-3 heads in the published checkpoint layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracle.checkpoints import Shape


def make_head(
    directory: Path,
    target: Shape,
    num_ids: int = 0,
    behind: tuple[int, int, int] = (1, 2, 3),
    **changes: Any,  # noqa: ANN401 # of config.json
) -> Path:
    """A head of a target of that shape, which it reads behind the layers `behind`; it proposes every id, or `num_ids`
    of them, spread evenly."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": target.vocab,
        "draft_vocab_size": num_ids or target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.context,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [num - 1 for num in behind]},
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, num_ids), directory / "model.safetensors")
    return directory


def _weights(config: dict[str, Any], num_ids: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden, size, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (size, hidden),
        "midlayer.mlp.up_proj": (size, hidden),
        "midlayer.mlp.down_proj": (hidden, size),
        "lm_head": (config["draft_vocab_size"], hidden),
    }
    norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    made = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    made |= {name: 1 + torch.randn(hidden, generator=generator) / 8 for name in norms}
    weights = {f"{name}.weight": weight for name, weight in made.items()}
    if num_ids:
        ids = torch.arange(num_ids) * config["vocab_size"] // num_ids
        weights["d2t"] = ids - torch.arange(num_ids)
        weights["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return weights
