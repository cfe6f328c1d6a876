"""Makes config.json and generation_config.json from the metadata of a GGUF file.

Ranges are not checked here: `engine.models.config` does so for every config.json.
"""

from collections.abc import Callable, Mapping

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.fields import MENDING, Json
from sluice_server.engine.models.gguf.architectures import GgufArchitecture, architecture_of, refused
from sluice_server.engine.models.gguf.reader import GgufHeader
from sluice_server.services.checkpoint.gguf.metadata import Metadata
from sluice_server.services.checkpoint.gguf.rope import read_scaling

SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    )
)  # control tokens that end an output, also where the metadata name another one
CONTROL = 3  # the type of a token that is no text
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores have another scale
GEMMA3_PATTERN = 6  # every sixth layer has full attention


def make_config(header: GgufHeader) -> dict[str, Json]:
    """Returns config.json. Raises ServiceError for what is missing, of another type, or not supported."""
    metadata, architecture = Metadata(header), architecture_of(header)
    heads, hidden = metadata.integer(".attention.head_count"), metadata.integer(".embedding_length")
    if heads < 1:
        raise metadata.must_be(".attention.head_count", "above 0")
    dim = metadata.integer(".attention.key_length", hidden // heads)
    for key in (".attention.value_length", ".rope.dimension_count"):
        if metadata.integer(key, dim) != dim:
            raise metadata.must_be(key, f"{dim}, the size of a key head")
    config: dict[str, Json] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": rows_of(header, "token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(".attention.head_count_kv", heads),
        "head_dim": dim,
        "intermediate_size": metadata.integer(".feed_forward_length"),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(".context_length"),
        "rope_theta": metadata.number(".rope.freq_base", 10_000.0),
        "rope_scaling": read_scaling(metadata, dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": dtype_of(header),
    }
    ids = {name: metadata.integer(f"tokenizer.ggml.{name}") for name in _ids(metadata)}
    return {**config, **ids, **_own(metadata, architecture)}


def make_generation_config(header: GgufHeader) -> dict[str, Json]:
    """Returns generation_config.json: the ids that end an output, and sampling parameters."""
    metadata = Metadata(header)
    ends = [metadata.integer(f"tokenizer.ggml.{key}") for key in END_KEYS if metadata.has(f"tokenizer.ggml.{key}")]
    if metadata.has("tokenizer.ggml.tokens") and metadata.has("tokenizer.ggml.token_type"):
        tokens, types = metadata.strings("tokenizer.ggml.tokens"), metadata.integers("tokenizer.ggml.token_type")
        pairs = enumerate(zip(tokens, types, strict=False))
        ends += [number for number, (token, kind) in pairs if kind == CONTROL and token in ENDS]
    found: dict[str, Json] = {name: metadata.number(key) for key, name in SAMPLING.items() if metadata.has(key)}
    if "top_k" in found:
        found["top_k"] = metadata.integer("general.sampling.top_k")
    return {"eos_token_id": list(dict.fromkeys(ends)), **found}


def rows_of(header: GgufHeader, name: str) -> int:
    """Returns the number of rows of a matrix. Raises ServiceError MODEL_INVALID."""
    info = header.tensors.get(name)
    if info is None or len(info.shape) != 2:
        raise Metadata(header).wrong(f"holds no matrix {name}: {MENDING}")
    return info.shape[0]


def dtype_of(header: GgufHeader) -> str:
    """Returns the dtype that loses nothing of the file's matrices, by the name in config.json."""
    names = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if names == {"BF16"}:
        return "bfloat16"
    return "float16" if names == {"F16"} else "float32"


def is_quantised(header: GgufHeader) -> bool:
    """Returns whether any tensor is of a quantised type."""
    return any(info.type.is_quantised for info in header.tensors.values())


def _ids(metadata: Metadata) -> list[str]:
    return [name for name in ("bos_token_id", "eos_token_id") if metadata.has(f"tokenizer.ggml.{name}")]


def _own(metadata: Metadata, architecture: GgufArchitecture) -> dict[str, Json]:
    """Returns the fields that only some architectures have."""
    return OWN[architecture.name](metadata)


def _llama(metadata: Metadata) -> dict[str, Json]:
    tensors = metadata.header.tensors
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _qwen2(metadata: Metadata) -> dict[str, Json]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(metadata: Metadata) -> dict[str, Json]:
    return {**_qwen2(metadata), "attention_bias": "blk.0.attn_q.bias" in metadata.header.tensors}


def _qwen3_moe(metadata: Metadata) -> dict[str, Json]:
    return {
        **_qwen3(metadata),
        "num_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(metadata: Metadata) -> dict[str, Json]:
    return {
        "hidden_act": "silu",
        "sliding_window": None,
        "num_local_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
    }


def _gemma(metadata: Metadata) -> dict[str, Json]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(metadata: Metadata) -> dict[str, Json]:
    """Gemma 2 and 3: the scale of scores is in no key. It is the head's size, but for the 27B models."""
    heads, hidden = metadata.integer(".attention.head_count"), metadata.integer(".embedding_length")
    is_large = metadata.integer(".block_count") == LARGE_GEMMA[metadata.architecture]
    dim = hidden // heads if is_large else metadata.integer(".attention.key_length", hidden // heads)
    caps: dict[str, Json] = {
        "attn_logit_softcapping": metadata.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number(".final_logit_softcapping", 30.0),
    }
    window = metadata.integer(".attention.sliding_window", 4096)
    return {**_gemma(metadata), **caps, **_windows(metadata, 2), "query_pre_attn_scalar": dim, "sliding_window": window}


def _gemma3(metadata: Metadata) -> dict[str, Json]:
    return {
        **_gemma2(metadata),
        **_windows(metadata, GEMMA3_PATTERN),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "rope_theta": metadata.number(".rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10_000.0),
    }


def _windows(metadata: Metadata, pattern: int) -> dict[str, Json]:
    """Returns the kinds of attention of the layers: the last of every `pattern` layers has no window."""
    key = ".attention.sliding_window_pattern"
    if metadata.has(key) and metadata.integer(key) != pattern:
        raise not_supported(metadata, key, str(pattern))
    layers = min(metadata.integer(".block_count"), 1 << 12)
    kinds: list[Json] = ["sliding_attention" if i % pattern else "full_attention" for i in range(1, layers + 1)]
    return {"layer_types": kinds}


def not_supported(metadata: Metadata, key: str, known: str) -> ServiceError:
    """Returns the error for a value that is valid and not supported."""
    name = f"{metadata.architecture}{key}" if key.startswith(".") else key
    return refused(metadata.header, f"{name} {metadata.header.metadata.get(name)!r:.80}", known)


OWN: Mapping[str, Callable[[Metadata], dict[str, Json]]] = {
    "LlamaForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
