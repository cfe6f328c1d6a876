"""GGUF files of random checkpoints, written as llama.cpp's converter writes them, with the `gguf` package."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's metadata. The default: all bytes, and names that no text has."""

    model: str = "gpt2"
    pre: str = "gpt-2"
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    special: tuple[tuple[str, Any], ...] = (("bos_token_id", 0), ("eos_token_id", 1))
    template: str = ""


def plain(size: int) -> Vocabulary:
    """A vocabulary of that many tokens: two special ones, a merge, and fillers."""
    tokens = ["<s>", "</s>", "a", "b", "ab", *(f"[{i}]" for i in range(size - 5))]
    return Vocabulary(tokens=tuple(tokens), types=(3, 3, *[1] * (size - 2)), merges=("a b",))


def of_tokenizer(path: Path, size: int, pre: str = "gpt-2", **special: object) -> Vocabulary:
    """The vocabulary of a byte-level tokenizer.json, filled up to that size."""
    found = json.loads(path.read_text())
    vocab = found["model"]["vocab"] | {one["content"]: one["id"] for one in found["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    tokens += [f"[{i}]" for i in range(size - len(tokens))]
    added = {one["content"]: 3 if one["special"] else 4 for one in found["added_tokens"]}
    return Vocabulary(
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(added.get(token, 1) for token in tokens),
        merges=tuple(" ".join(pair) for pair in found["model"]["merges"]),
        special=tuple(special.items()),
    )


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    for name, value in vocabulary.special:
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", value)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: Callable[[str], str] | str = "F32",
    vocabulary: Vocabulary | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Writes the GGUF file of a checkpoint. `kind`: the type of all matrices, or that of a tensor by its name.

    `more`: further metadata, and for None such as are left out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in (_metadata(config) | (more or {})).items():
        name = key.replace("*", gguf.MODEL_ARCH_NAMES[arch])
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    write_vocabulary(writer, vocabulary or plain(config["vocab_size"]))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, weight in _tensors(checkpoint, config).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        wanted = (
            "F32" if weight.ndim == 1 or "ffn_gate_inp" in found else kind if isinstance(kind, str) else kind(found)
        )
        write_tensor(writer, found, weight, wanted)
    factors = _factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    _finish(writer)
    return path


def write_tensor(writer: gguf.GGUFWriter, name: str, weight: Array, kind: str) -> None:
    """Writes a matrix in a type; K-quants, for which the package has no quantiser, as random blocks."""
    number = gguf.GGMLQuantizationType[kind]
    data = random_blocks(weight.shape, kind) if kind.endswith("_K") else gguf.quants.quantize(weight, number)
    writer.add_tensor(name, data, raw_dtype=number)


def random_blocks(shape: tuple[int, ...], kind: str) -> Array:
    """Random blocks of a K-quant, whose scales are small enough to compute with."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(math.prod(shape))
    data = rng.integers(0, 256, (math.prod(shape) // block, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    span = {"Q2_K": 15 * 3, "Q3_K": 32 * 4, "Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 128 * 32}[kind]
    for place in places:
        scales = rng.uniform(0.2, 1.0, len(data)) / span
        data[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return data.reshape(*shape[:-1], -1)


def widened(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file by its names, as the `gguf` package reads them."""
    return {
        one.name: torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).astype(np.float32))
        for one in gguf.GGUFReader(path).tensors
    }


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for an architecture; `*` stands for its name."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "*.context_length": config["max_position_embeddings"],
        "*.embedding_length": config["hidden_size"],
        "*.block_count": config["num_hidden_layers"],
        "*.feed_forward_length": config["intermediate_size"],
        "*.attention.head_count": config["num_attention_heads"],
        "*.attention.head_count_kv": config["num_key_value_heads"],
        "*.attention.key_length": config["head_dim"],
        "*.attention.value_length": config["head_dim"],
        "*.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "*.rope.freq_base": float(full.get("rope_theta", 10_000.0)),
    }
    if full.get("rope_type") in ("linear", "yarn"):
        found["*.rope.scaling.type"] = full["rope_type"]
        found["*.rope.scaling.factor"] = float(full["factor"])
    if full.get("rope_type") == "yarn":
        found["*.rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    num = config.get("num_local_experts") or config.get("num_experts")
    if num:
        found |= {"*.expert_count": num, "*.expert_used_count": config["num_experts_per_tok"]}
        found["*.expert_feed_forward_length"] = config.get("moe_intermediate_size")
    if config["model_type"] in ("gemma2", "gemma3_text"):
        found["*.attention.sliding_window"] = config["sliding_window"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config["model_type"] == "gemma2":
            found[f"*.{name}"] = float(config[name])
    return found


def _factors(config: dict[str, Any]) -> Array | None:
    """What Llama 3's scaling divides each frequency by, as its tensor."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, config["head_dim"], 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / config["head_dim"])
        smooth = (original / length - low) / (high - low)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        if length < original / high:
            factors[-1] = 1.0
        elif length > original / low:
            factors[-1] = rope["factor"]
    return np.array(factors, dtype=np.float32)


def _tensors(checkpoint: Path, config: dict[str, Any]) -> dict[str, Array]:
    """The weights as the converter changes them: permuted, with the experts of a layer as one, norms with their 1."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        weight = tensor.float().numpy()
        if config["model_type"] in ("llama", "mistral", "mixtral"):
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{part}." in name:
                    weight = permuted(weight, config[heads])
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        expert = EXPERT.search(name)
        if expert is None:
            found[name] = weight
        else:
            experts.setdefault(EXPERT.sub(".experts.", name), {})[int(expert[1])] = weight
    for name, each in experts.items():
        found[name] = np.stack([each[i] for i in range(len(each))])
    return found


def permuted(weight: Array, heads: int) -> Array:
    """Interleaves the two halves of each head."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
