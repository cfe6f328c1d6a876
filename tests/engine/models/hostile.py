"""Config files with wrong values: a small correct one of each architecture, and every field of it with values that no
file should have."""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice_server.engine.models.rules import RULES

Values = dict[str, Any]
PLAIN: Values = {
    "vocab_size": 111,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS: Values = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
TRUTHFUL: dict[str, Values] = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3},
    "MistralForCausalLM": {"sliding_window": 10},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"rope_scaling": YARN},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "GptOssForCausalLM": {**GPT_OSS, "swiglu_limit": 7.0},
    "GraniteForCausalLM": {"residual_multiplier": 0.22, "logits_scaling": 8.0},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"rope_scaling": LONGROPE, "partial_rotary_factor": 1.0},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "SmolLM3ForCausalLM": {},
}
_BLOCKS: Values = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_ENCODER: Values = {**_BLOCKS, "intermediate_size": 80, "max_position_embeddings": 66, "layer_norm_eps": 1e-12}
_LOCAL: Values = {"local_attention": 16, "global_attn_every_n_layers": 3, "norm_eps": 1e-5}
TRUTHFUL_VISION: Values = {
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_config": {"model_type": "clip_vision_model"},
}
TRUTHFUL_SIZED_VISION: Values = {  # images of any size
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {"hidden_size": 3584, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "vision_config": {},
}
TRUTHFUL_DEEP_VISION: Values = {  # and rows from several depths
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "hidden_size": 3584,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {},
}
TRUTHFUL_BROKEN_VISION: Values = {  # and ids between an image's lines
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {},
    "vision_config": {},
}
TRUTHFUL_WHOLE_VISION: Values = {  # whose tokens of an image see one another
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {},
    "vision_config": {"image_size": 896, "patch_size": 14},
}
TRUTHFUL_ENCODERS: dict[str, Values] = {
    "BertModel": {**_ENCODER, "type_vocab_size": 2, "hidden_act": "gelu"},
    "XLMRobertaForSequenceClassification": {**_ENCODER, "type_vocab_size": 1, "pad_token_id": 1},
    "MPNetForMaskedLM": {**_ENCODER, "relative_attention_num_buckets": 32},
    "ModernBertModel": {**_ENCODER, **_LOCAL, "global_rope_theta": 1e5, "local_rope_theta": 1e4},
}
OF_ENCODERS = [
    *("architectures", "hidden_act", "hidden_activation", "norm_eps", "layer_types", "rope_parameters", "norm_bias"),
    *(
        "position_embedding_type",
        "is_decoder",
        "quantization_config",
        "classifier_pooling",
        "attention_bias",
        "id2label",
    ),
    *("rope_parameters.full_attention", "rope_parameters.full_attention.rope_theta", "sentence_transformers"),
]
OTHERS = [  # beside the numbers
    "architectures",
    "attention_bias",
    "eos_token_id",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "mlp_bias",
    "mlp_only_layers",
    "no_rope_layers",
    "norm_topk_prob",
    "qkv_bias",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "torch_dtype",
    "use_bidirectional_attention",
    "use_sliding_window",
]
QUANTISED = ["bits", "group_size", "quant_method", "version", "zero_point", "config_groups", "format"]
ROPES = ["rope_parameters", "rope_scaling", "rope_parameters.full_attention", "rope_parameters.sliding_attention"]
IN_ROPES = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
    "truncate",
]
FIELDS = [
    *RULES,
    *OTHERS,
    *(f"quantization_config.{name}" for name in QUANTISED),
    *(f"{rope}.{name}" for rope in ROPES for name in IN_ROPES),
]
GENERATION = ["eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"]
HEAD = ["draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config"]
HOSTILE: list[Any] = [
    *[0, -1, 1, 3, 10**9, 10**12, 10**400, True, False, None],
    *[0.5, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf],
    *["", "8", "x" * 10_000, [], [1], [-1], [[]] * 50, {}, {"a": {"b": []}}],
]


def truthful(architecture: str) -> Values:
    return {**copy.deepcopy(PLAIN), **copy.deepcopy(TRUTHFUL[architecture]), "architectures": [architecture]}


def lies(values: Values, fields: list[str], told: Sequence[Any] = HOSTILE) -> Iterator[tuple[str, Values]]:
    """Configs with one field replaced each, by each of `told`, and a description of the change."""
    for path in fields:
        *outer, name = path.split(".")
        for value in told:
            made = copy.deepcopy(values)
            inner = made
            for step in outer:
                if not isinstance(inner.get(step), dict):
                    inner[step] = {"rope_type": "yarn", "factor": 2.0} if step.startswith("rope") else {}
                inner = inner[step]
            inner[name] = value
            yield f"{path} = {str(value)[:40]}", made


def write(directory: Path, values: Values, name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(values))
    return directory
