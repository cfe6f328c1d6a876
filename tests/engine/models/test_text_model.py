"""The text of checkpoints that also take images: equal to transformers', from files of both spellings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.models.text_model import WITH_TEXT
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.oracle.image_checkpoints import CLASSES, make_image_checkpoint

CPU = torch.device("cpu")
# The fields that decide, as the files of the checkpoints on the hub have them.
GEMMA_3_4B: dict[str, Any] = {
    **{"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "bfloat16"},
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    },
}
LLAVA_7B: dict[str, Any] = {
    **{"architectures": ["LlavaForConditionalGeneration"], "tie_word_embeddings": False},
    "text_config": {
        **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama"},
        **{"rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064},
    },
}
QWEN2_5_VL_3B: dict[str, Any] = {  # its text's fields are beside the others
    **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 2048, "num_hidden_layers": 36},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936},
    **{"max_position_embeddings": 128000, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "model_type": "qwen2_5_vl"},
    **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70, "tie_word_embeddings": True},
    **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "eos_token_id": 151645},
}


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("name", list(CLASSES))
def test_greedy_text_equals_transformers(name: str, as_published: bool, tmp_path: Path) -> None:
    oracle = make_image_checkpoint(tmp_path, name, as_published=as_published)
    model = load_model(tmp_path, read_served(tmp_path), torch.float32, CPU)
    cache, tables, ids, got = model.new_cache(8, 8), np.arange(8, dtype=np.int32)[None], list(range(3, 33)), []
    at = 0
    for _ in range(8):
        meta = AttentionMetadata.build([len(ids) - at], [len(ids)], tables, 8, CPU)
        hidden = model.forward(torch.tensor(ids[at:]), torch.arange(at, len(ids)), cache, meta)
        got.append(model.logits(hidden[-1:])[0])
        at = len(ids)
        ids.append(int(got[-1].argmax()))
    with torch.inference_mode():
        want = oracle(torch.tensor([ids])).logits[0, 29:-1]
    assert float((torch.stack(got) - want).abs().max()) < 1e-4
    assert ids[30:] == want.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("config", "num_parameters", "architecture"),
    [
        (GEMMA_3_4B, 3_880_099_328 + 64 * 2560, "Gemma3ForCausalLM"),
        (LLAVA_7B, 6_738_415_616 + 64 * 4096 * 2, "LlamaForCausalLM"),
        (QWEN2_5_VL_3B, 3_085_938_688, "Qwen2ForCausalLM"),
    ],
)
def test_published_files_state_these_sizes(
    config: dict[str, Any], num_parameters: int, architecture: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_served(tmp_path)
    assert (plan_model(found, torch.bfloat16).num_parameters, found.architecture) == (num_parameters, architecture)


def test_windows_and_ends_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    config = read_config(tmp_path)
    assert config.windows[:6] == (1024,) * 5 + (None,) and config.eos_ids == (1, 106)
    assert config.rope.kind == "linear" and config.local_rope is not None and config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architectures": ["NewForConditionalGeneration"]}, "architecture 'NewForConditionalGeneration' is not supp"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "x"}}, "'x', which is"),
    ],
)
def test_an_unknown_one_is_refused_before_its_shape_is_read(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ServiceError, match=said) as caught:
        read_served(tmp_path)
    assert caught.value.code is Code.UNIMPLEMENTED


def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    for name in WITH_TEXT:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": [1]}))
        with pytest.raises(ServiceError, match=r"text_config is \[1\]; it must be an object"):
            read_config(tmp_path)
