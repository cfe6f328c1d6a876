"""The config files of published Gemma models, field by field, and the refused ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.groups import layer_groups
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.models.registry import traits_of
from tests.oracle.checkpoints import Shape, make_checkpoint

GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    **{"hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384},
    **{"max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1},
    **{"head_dim": 256, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
    **{"eos_token_id": 1, "torch_dtype": "bfloat16"},
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 224},
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304},
    **{"intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26},
    **{"num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000},
    **{"sliding_window": 4096, "cache_implementation": "hybrid", "eos_token_id": 1, "torch_dtype": "float32"},
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256},
    **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256},
    **{"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1},
    **{"rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
    **{"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144, "eos_token_id": [1, 106]},
}
USUAL = {"sliding_window": 4096, "query_pre_attn_scalar": 256}  # of the classes that write such files
PUBLISHED = {"2b": (GEMMA_2B, 2_506_172_416), "2-2b": (GEMMA_2_2B, 2_614_341_888), "3-1b": (GEMMA_3_1B, 999_885_952)}


def written(path: Path, values: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_shapes_are_planned_to_the_last_parameter(name: str, tmp_path: Path) -> None:
    """Embeddings are tied unless a file says otherwise."""
    values, num = PUBLISHED[name]
    plan = plan_model(read_config(written(tmp_path, values)), torch.bfloat16)
    assert plan.num_parameters == num and "lm_head.weight" not in plan.shapes


def test_what_a_file_leaves_unsaid(tmp_path: Path) -> None:
    said = {"architectures", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"}
    said |= {"num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "eos_token_id"}
    for values in (GEMMA_2B, GEMMA_2_2B, GEMMA_3_1B):
        usual = {name: value for name, value in USUAL.items() if name in values}
        whole = read_config(written(tmp_path, {**values, **usual}))
        few = read_config(written(tmp_path, {name: values[name] for name in said}))
        assert traits_of(few) == traits_of(whole) and few.activation == whole.activation == "gelu_tanh"
        assert (few.head_dim, few.rope, few.local_rope) == (whole.head_dim, whole.rope, whole.local_rope)


def test_layers_take_turns(tmp_path: Path) -> None:
    second = read_config(written(tmp_path, GEMMA_2_2B))
    assert second.windows == (4096, None) * 13
    third = read_config(written(tmp_path, GEMMA_3_1B))
    assert third.windows == (*((512,) * 5 + (None,)) * 4, 512, 512)
    assert third.local_rope is not None and (third.rope.theta, third.local_rope.theta) == (1e6, 1e4)
    assert layer_groups(second.windows).windows == (None, 4096)
    assert layer_groups(third.windows).windows == (None, *[512] * 6)
    traits = traits_of(second)
    assert (traits.score_scale, traits.score_cap, traits.logit_cap) == (224**-0.5, 50.0, 30.0)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another activation": (GEMMA_2_2B, {"hidden_activation": "gelu"}, "hidden_act 'gelu' is not supported; supported"),
    "of another family": ({**GEMMA_2B, "architectures": ["LlamaForCausalLM"]}, {}, "hidden_act 'gelu' is not"),
    "cap below 0": (GEMMA_2_2B, {"final_logit_softcapping": -30.0}, r"final_logit_softcapping is -30\.0; it must be"),
    "cap of 0": (GEMMA_2_2B, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; it must be a number from"),
    "cap in words": (GEMMA_2_2B, {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'; it must be a num"),
    "scalar of 0": (GEMMA_2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number from"),
    "caps in Gemma 3": (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; Gemma 3 is sup"),
    "both directions": (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is set; sup"),
    "no window": (GEMMA_3_1B, {"sliding_window": None}, "sliding_window is null; layers of sliding_attention need"),
    "other layers": (GEMMA_2_2B, {"layer_types": ["linear_attention"] * 26}, "layer_types names 'linear_attention'"),
    "too few layers": (GEMMA_2_2B, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 26 layers"),
    "rope of a kind": (
        GEMMA_3_1B,
        {"rope_parameters": {"full_attention": {"rope_type": "magic"}, "sliding_attention": {}}},
        "rope_parameters.full_attention.rope_type is 'magic'; supported are default",
    ),
    "of images": (GEMMA_2B, {"architectures": ["PaliGemmaForConditionalGeneration"]}, "'PaliGemmaForConditionalGen"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_built_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values, changes, message = REFUSED[name]
    with pytest.raises(ServiceError, match=message) as caught:
        traits_of(read_config(written(tmp_path, {**values, **changes})))
    assert caught.value.code in (Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)


def test_a_norm_that_is_missing_is_named(tmp_path: Path) -> None:
    """The checkpoint of a Gemma whose config says Gemma 2."""
    make_checkpoint(tmp_path, Shape("gemma", tied=True))
    values = json.loads((tmp_path / "config.json").read_text())
    written(tmp_path, {**values, "architectures": ["Gemma2ForCausalLM"]})
    with pytest.raises(ServiceError, match=r"holds the tensor model\.layers\.0\.pre_feedforward_layernorm\.weight"):
        load_model(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_in_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """The root of 48 is 6.9282 in float32 and 6.9375 in bfloat16, where the product is rounded, too."""
    make_checkpoint(tmp_path, Shape("gemma2", tied=True, layers=1))
    model = load_model(tmp_path, read_config(tmp_path), dtype, torch.device("cpu"))
    ids = torch.tensor([3, 3, 7])
    want = model.embeddings[ids] * torch.tensor(48**0.5).to(dtype)
    assert torch.equal(model._embed(ids), want.float()) and model.embeddings.dtype is dtype
