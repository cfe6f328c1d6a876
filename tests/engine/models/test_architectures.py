"""What published files of single architectures say, what of it is refused, and which layers are one call."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.groups import layer_groups
from sluice_server.engine.models.config import read_config, read_head_config
from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.models.not_built import NOT_BUILT
from sluice_server.engine.models.registry import ARCHITECTURES, read_served, traits_of
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.kernels.cpu import builds
from tests.engine.models.hostile import truthful, write
from tests.oracle.checkpoints import CLASSES, Shape, make_checkpoint

CPU = torch.device("cpu")
Values = dict[str, Any]
QWEN_MOE: Values = {
    "architectures": ["Qwen2MoeForCausalLM"],
    **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192},
    **{"num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False},
    **{"max_window_layers": 21, "vocab_size": 151936, "decoder_sparse_step": 1, "moe_intermediate_size": 1408},
    **{"shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False},
}
OLMO2_7B: Values = {
    "architectures": ["Olmo2ForCausalLM"],
    **{"attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096},
    **{"intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "vocab_size": 100352},
    **{"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000},
}
PHI3_MINI_4K: Values = {
    "architectures": ["Phi3ForCausalLM"],
    **{"eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192},
    **{"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32},
    **{"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0},
    **{"sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064},
}
FACTORS = {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48}
PHI3_MINI_128K: Values = {
    **PHI3_MINI_4K,
    **{"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": {**FACTORS, "type": "longrope"}},
}
PHI4_MINI: Values = {
    **PHI3_MINI_128K,
    **{"vocab_size": 200064, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "partial_rotary_factor": 0.75,
}
GRANITE_8B: Values = {
    "architectures": ["GraniteForCausalLM"],
    **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    **{"logits_scaling": 16.0, "hidden_size": 4096, "intermediate_size": 12800, "max_position_embeddings": 4096},
    **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rope_theta": 10000.0},
    **{"rms_norm_eps": 1e-05, "tie_word_embeddings": True, "vocab_size": 49155, "mlp_bias": False},
}
SMOLLM3_3B: Values = {
    "architectures": ["SmolLM3ForCausalLM"],
    **{"hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 16},
    **{"num_hidden_layers": 36, "num_key_value_heads": 4, "rope_theta": 5000000.0, "vocab_size": 128256},
    **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "use_sliding_window": False},
    **{"layer_types": ["full_attention"] * 36, "sliding_window": None, "rms_norm_eps": 1e-06},
}
PUBLISHED = {
    "qwen2_moe": QWEN_MOE,
    "olmo2": OLMO2_7B,
    "phi3": PHI3_MINI_4K,
    "phi3-long": PHI3_MINI_128K,
    "phi4": PHI4_MINI,
    "granite": GRANITE_8B,
    "smollm3": SMOLLM3_3B,
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_shapes_are_planned_to_the_last_parameter(name: str, tmp_path: Path) -> None:
    values = PUBLISHED[name]
    config = read_served(write(tmp_path, values))
    config_class, model_class = next(
        two for make in CLASSES.values() if (two := make())[1].__name__ == values["architectures"][0]
    )
    with torch.device("meta"):
        oracle = model_class(config_class(**copy.deepcopy(values), pad_token_id=None))
    plan = plan_model(config, torch.bfloat16)
    assert plan.num_parameters == oracle.num_parameters()
    assert ("lm_head.weight" in plan.shapes) is not config.tied_embeddings


def refused(values: Values, tmp_path: Path) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read_served(write(tmp_path, values))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("name", list(NOT_BUILT))
def test_known_architectures_that_are_not_built_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """Before any other field is read: of the file there is no more than this."""
    error = refused({"architectures": [name]}, tmp_path)
    assert error.code is Code.UNIMPLEMENTED and name in error.message and NOT_BUILT[name] in error.message
    assert name not in ARCHITECTURES


SCALED = {"rope_type": "linear", "factor": 2.0}
PAIRS = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: dict[str, tuple[str, Values, str]] = {
    "another scaling": ("Phi3", {"rope_scaling": SCALED}, "rope_type is 'linear'; Phi-3 is supported"),
    "too few factors": ("Phi3", {"rope_scaling": {**PAIRS, "short_factor": [1.0]}}, "short_factor has 1 numbers; 16 r"),
    "no factors": ("Phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor is None; it must be a list, of"),
    "odd factors": ("Phi3", {"rope_scaling": {**PAIRS, "long_factor": ["1"] * 8}}, "long_factor is .* must be a list"),
    "a part that is odd": ("Phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2, which rotates 3 num"),
    "parts elsewhere": ("Olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; Olmo2ForCausalLM is s"),
    "no shared expert": ("Qwen2Moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    "no experts": ("Qwen2Moe", {"num_experts": 0}, "config.json names no experts"),
    "a gate of experts": ("Qwen2Moe", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_tanh' is not supported"),
    "a gate": ("Granite", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "a factor of 0": ("Granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0; it must be a number from"),
    "layers in words": (
        "SmolLM3",
        {"no_rope_layers": [True, False]},
        "no_rope_layers is .*; it must be a list of 0 and 1",
    ),
    "too few layers": ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
    "no window": (
        "SmolLM3",
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
        "sliding_window is n",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_built_is_refused_by_name(name: str, tmp_path: Path) -> None:
    architecture, changes, message = REFUSED[name]
    values = {**truthful(f"{architecture}ForCausalLM"), **changes}
    error = refused(values, tmp_path)
    assert error.code in (Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)
    with pytest.raises(ServiceError, match=message):
        read_served(tmp_path)


def test_a_head_is_rotated_as_a_whole(tmp_path: Path) -> None:
    values = {**truthful("LlamaForCausalLM"), "num_hidden_layers": 1, "partial_rotary_factor": 0.5}
    with pytest.raises(ServiceError, match=r"partial_rotary_factor is 0\.5; an EAGLE-3 head is supported with 1\.0"):
        read_head_config(write(tmp_path, values))


def test_layers_of_smollm3_take_turns(tmp_path: Path) -> None:
    plain = read_config(write(tmp_path, {**truthful("SmolLM3ForCausalLM"), "num_hidden_layers": 5}))
    assert traits_of(plain).rotated == (True, True, True, False, True) and plain.windows == (None,) * 5
    more = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 5}
    windowed = read_config(write(tmp_path, {**truthful("SmolLM3ForCausalLM"), **more}))
    assert windowed.windows == (None, None, None, 7, None)  # of layers that do not rotate


def test_windows_of_qwen2_experts_are_those_of_every_other_lower_layer(tmp_path: Path) -> None:
    more = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3, "num_hidden_layers": 5}
    assert read_config(write(tmp_path, {**truthful("Qwen2MoeForCausalLM"), **more})).windows == (7, None, 7, None, None)


def test_what_smollm3_and_phi_leave_unsaid(tmp_path: Path) -> None:
    said = {"rope_theta": None, "tie_word_embeddings": True, "num_key_value_heads": None}
    values = {name: one for name, one in truthful("SmolLM3ForCausalLM").items() if name not in said}
    smollm = read_config(write(tmp_path, values))
    assert (smollm.rope.theta, smollm.tied_embeddings, smollm.num_kv_heads) == (2e6, True, 4)
    values = {name: one for name, one in truthful("Phi3ForCausalLM").items() if name != "rms_norm_eps"}
    assert read_config(write(tmp_path, values)).norm_eps == 1e-5


def test_windows_of_all_layers_give_blocks_back(tmp_path: Path) -> None:
    assert layer_groups(read_config(write(tmp_path, PHI3_MINI_4K)).windows).windows == (2047,)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_all_names_of_longrope_mean_it(kind: str, tmp_path: Path) -> None:
    """The first files of Phi-3 have two others."""
    values = {**truthful("Phi3ForCausalLM"), "rope_scaling": {**PAIRS, "type": kind}}
    assert read_served(write(tmp_path, values)).rope.kind == "longrope"


def test_an_operator_is_told_which_factors_serve(tmp_path: Path) -> None:
    options = (("original_max_position_embeddings", 64), ("rope_parameters", {**PAIRS, "rope_type": "longrope"}))
    make_checkpoint(tmp_path, Shape("phi3", hidden=64, options=options))
    config = read_served(tmp_path)
    assert load_model(tmp_path, config, torch.float32, CPU, 64).notes == ()
    (note,) = load_model(tmp_path, config, torch.float32, CPU, 65).notes
    assert "as 65 positions are served and the model was first trained with 64" in note


def test_residual_scale_needs_norms_that_undo_it() -> None:
    message = "residual_scale is built for norms before attention and MLP alone"
    with pytest.raises(ValueError, match=message):
        ArchitectureTraits(windows=(None,), residual_scale=0.5, qk_norm=True)
    with pytest.raises(ValueError, match=message):
        ArchitectureTraits(windows=(None,), residual_scale=0.5, post_norms=True)
    with pytest.raises(ValueError, match="without pre_norms there must be post_norms"):
        ArchitectureTraits(windows=(None,), pre_norms=False)


ONE_CALL = {"phi3": True, "granite": True, "smollm3": True, "olmo2": False, "qwen2_moe": False}


@pytest.mark.skipif(not builds.is_available(), reason="installed without a C++ compiler")
@pytest.mark.parametrize("name", list(ONE_CALL))
def test_which_layers_are_one_call(name: str, tmp_path: Path) -> None:
    more = (("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40))
    make_checkpoint(tmp_path, Shape(name, hidden=64, options=more if name == "qwen2_moe" else ()))
    model = load_model(tmp_path, read_served(tmp_path), torch.float32, CPU)
    layers = [one._layer for one in model._layers if isinstance(one, DecoderLayer)]
    assert {one.arguments is not None for one in layers} == {ONE_CALL[name]}


def test_projections_that_are_one_tensor_are_named_when_missing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape("llama", hidden=64))
    values = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, {**values, "architectures": ["Phi3ForCausalLM"]})
    with pytest.raises(ServiceError, match=r"holds the tensor model\.layers\.0\.mlp\.gate_up_proj\.weight"):
        load_model(tmp_path, read_config(tmp_path), torch.float32, CPU)
