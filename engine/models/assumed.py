"""Defaults of fields missing from a config.json, by architecture: published files rely on them.

Depends on the standard library only. Fields with one meaning everywhere have their defaults where they are read.
"""

from collections.abc import Mapping

from sluice_server.engine.models.fields import Json

GEMMA: dict[str, Json] = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
LATER: dict[str, Json] = {**GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
ASSUMED: Mapping[str, dict[str, Json]] = {
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": {
        **LATER,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "Gemma3ForCausalLM": {
        **LATER,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "Qwen2MoeForCausalLM": {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "shared_expert_intermediate_size": 5632,
    },
    "SmolLM3ForCausalLM": {
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    "GptOssForCausalLM": {"attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2},
}
