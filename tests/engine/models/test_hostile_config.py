"""Config files with wrong values: each is read as it says, or refused by one line that names the file, without taking
the memory it claims. A value that the tensors contradict is refused when they are loaded, or the model computes."""

import copy
import itertools
import json
import math
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config, read_head_config
from sluice_server.engine.models.encoders.reading import SENTENCES
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.models.rules import RULES
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.parameters import FROM_MODEL
from sluice_server.engine.request import SamplingParams
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.models.hostile import (
    FIELDS,
    GENERATION,
    HEAD,
    OF_ENCODERS,
    TRUTHFUL,
    TRUTHFUL_BROKEN_VISION,
    TRUTHFUL_DEEP_VISION,
    TRUTHFUL_ENCODERS,
    TRUTHFUL_SIZED_VISION,
    TRUTHFUL_VISION,
    TRUTHFUL_WHOLE_VISION,
    Values,
    lies,
    truthful,
    write,
)
from tests.oracle.checkpoints import Shape, make_checkpoint

MOST_BYTES = 8 << 20
CPU = torch.device("cpu")


def refusal(read: Callable[[], object]) -> str:
    """The one line of the refusal; "" if the config is accepted."""
    try:
        read()
    except ServiceError as error:
        assert "\n" not in error.message
        assert len(error.message) < 600
        return error.message
    return ""


@pytest.mark.parametrize("architecture", TRUTHFUL_ENCODERS)
def test_every_field_of_an_encoder_is_read_or_refused_by_a_line(architecture: str, tmp_path: Path) -> None:
    base = {**TRUTHFUL_ENCODERS[architecture], "architectures": [architecture]}
    assert refusal(lambda: read_served(write(tmp_path, base))) == ""
    num_refused = 0
    for what, values in lies(base, [*base, *OF_ENCODERS]):
        said = refusal(lambda values=values: read_served(write(tmp_path, values)))  # type: ignore[misc] # bound now
        num_refused += bool(said)
        assert not said or "config.json: " in said or "supported" in said, what
    assert num_refused > 10 * len(base)


OF_VISION = [
    *("architectures", "image_token_index", "vision_config", "vision_feature_layer", "vision_feature_select_strategy"),
    *("projector_hidden_act", "multimodal_projector_bias", "vision_config.model_type", "vision_config.hidden_act"),
    *("vision_config.image_size", "vision_config.patch_size", "vision_config.num_channels"),
    *("vision_config.hidden_size", "vision_config.intermediate_size", "vision_config.layer_norm_eps"),
    *("vision_config.num_hidden_layers", "vision_config.num_attention_heads"),
]
OF_SIZED_VISION = [
    *("architectures", "image_token_id", "text_config", "vision_config", "vision_config.rope_parameters"),
    *("text_config.hidden_size", "text_config.rope_scaling", "text_config.rope_scaling.mrope_section"),
    *("vision_config.depth", "vision_config.num_heads", "vision_config.hidden_size", "vision_config.intermediate_size"),
    *("vision_config.patch_size", "vision_config.spatial_merge_size", "vision_config.temporal_patch_size"),
    *("vision_config.window_size", "vision_config.fullatt_block_indexes", "vision_config.out_hidden_size"),
    *("vision_config.in_channels", "vision_config.in_chans", "vision_config.hidden_act"),
]
OF_DEEP_VISION = ["vision_config.deepstack_visual_indexes", "vision_config.num_position_embeddings"]
OF_BROKEN_VISION = [
    *("architectures", "image_token_index", "spatial_merge_size", "vision_feature_layer", "projector_hidden_act"),
    *(
        "multimodal_projector_bias",
        "text_config",
        "text_config.rms_norm_eps",
        "vision_config",
        "vision_config.hidden_act",
    ),
    *("vision_config.hidden_size", "vision_config.num_attention_heads", "vision_config.rope_theta"),
]
OF_WHOLE_VISION = [
    *("architectures", "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "text_config"),
    *("text_config.sliding_window", "vision_config", "vision_config.image_size", "vision_config.hidden_size"),
]
BREAKS: Values = {"added_tokens_decoder": {"12": {"content": "[IMG_BREAK]"}, "13": {"content": "[IMG_END]"}}}
VISIONS = (
    (TRUTHFUL_VISION, OF_VISION),
    (TRUTHFUL_SIZED_VISION, OF_SIZED_VISION),
    (TRUTHFUL_DEEP_VISION, OF_DEEP_VISION),
    (TRUTHFUL_BROKEN_VISION, OF_BROKEN_VISION),
    (TRUTHFUL_WHOLE_VISION, OF_WHOLE_VISION),
)
NO_NUMBER = (math.nan,)  # which no field may be
QUICK = {"Qwen3MoeForCausalLM", "Gemma3ForCausalLM"}  # which read what there is to read
ARCHITECTURES = [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in TRUTHFUL]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_with_every_lie_is_read_or_refused_by_a_line(architecture: str, tmp_path: Path) -> None:
    base = truthful(architecture)
    assert refusal(lambda: read_served(write(tmp_path, base))) == ""
    num_refused = 0
    for what, values in lies(base, FIELDS):
        said = refusal(lambda values=values: read_served(write(tmp_path, values)))  # type: ignore[misc] # bound now
        num_refused += bool(said)
        is_ours = "supported" in said or "is not served so" in said
        assert not said or "config.json: " in said or is_ours, what
    assert num_refused > len(FIELDS)


def test_what_a_file_claims_takes_no_memory(tmp_path: Path) -> None:
    base = truthful("Qwen3MoeForCausalLM")
    tracemalloc.start()
    try:
        for what, values in lies(base, list(RULES)):
            refusal(lambda values=values: read_served(write(tmp_path, values)))  # type: ignore[misc] # bound now
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, what
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(RULES.keys() - {row.name for row in FROM_MODEL}))
def test_every_rule_is_asked(name: str, tmp_path: Path) -> None:
    """Every limit of the table is used by a check."""
    lied = itertools.chain(of_decoders(name, tmp_path), of_encoders(name, tmp_path), of_vision(name, tmp_path))
    if not any(f"{name} is nan; it must be" in refusal(read) for read in lied):
        pytest.fail(f"{name} is read by no architecture")


def of_decoders(name: str, path: Path) -> Iterator[Callable[[], object]]:
    """Yields what reads the file of a decoder, after a lie about a field has been written into it."""
    for architecture in TRUTHFUL:
        base = truthful(architecture)
        for at in (name, f"rope_parameters.{name}", f"rope_scaling.{name}"):
            for _, values in lies(base, [at], NO_NUMBER):
                if name == "draft_vocab_size":
                    write(path, {**values, "num_hidden_layers": 1})
                    yield lambda: read_head_config(path)
                else:
                    write(path, values)
                    yield lambda: read_config(path)


def of_encoders(name: str, path: Path) -> Iterator[Callable[[], object]]:
    """Yields the same for an encoder and for its settings."""
    for encoder, base in TRUTHFUL_ENCODERS.items():
        named = {**base, "architectures": [encoder]}
        for _, values in lies(named, [name], NO_NUMBER):
            write(path, values)
            yield lambda: read_served(path)
        write(path, named)
        for _, values in lies({}, [name], NO_NUMBER):
            write(path, values, SENTENCES)
            yield lambda: read_served(path)
        (path / SENTENCES).unlink()


def of_vision(name: str, path: Path) -> Iterator[Callable[[], object]]:
    """Yields the same for a vision tower."""
    for base, fields in VISIONS:
        for _, values in lies(base, [one for one in fields if one.split(".")[-1] == name], NO_NUMBER):
            write(path, values)
            yield lambda: read_vision(path)


@pytest.mark.parametrize(("base", "fields"), VISIONS, ids=["one size", "any", "deep", "broken", "whole"])
def test_every_field_of_a_vision_tower_is_read_or_refused_by_a_line(
    base: Values, fields: list[str], tmp_path: Path
) -> None:
    write(tmp_path, BREAKS, "tokenizer_config.json")
    assert refusal(lambda: read_vision(write(tmp_path, base))) == ""
    num_refused = 0
    for what, values in lies(base, fields):
        said = refusal(lambda values=values: read_vision(write(tmp_path, values)))  # type: ignore[misc] # bound now
        num_refused += bool(said)
        assert not said or "config.json: " in said or "supported" in said, what
    assert num_refused > 5 * len(fields)


def test_every_lie_of_a_generation_config_is_read_or_refused_by_a_line(tmp_path: Path) -> None:
    write(tmp_path, truthful("LlamaForCausalLM"))
    for what, values in lies({"eos_token_id": 2}, GENERATION):
        said = refusal(lambda values=values: read_served(write(tmp_path, values, "generation_config.json")))  # type: ignore[misc] # bound now
        assert not said or "generation_config.json: " in said, what


def test_every_lie_of_a_head_is_read_or_refused_by_a_line(tmp_path: Path) -> None:
    base = {**truthful("LlamaForCausalLM"), "num_hidden_layers": 1}
    for what, values in lies(base, HEAD):
        said = refusal(lambda values=values: read_head_config(write(tmp_path, values)))  # type: ignore[misc] # bound now
        assert not said or "config.json: " in said, what


GENERATED: list[tuple[Values, SamplingParams]] = [
    ({"top_k": -1}, SamplingParams(top_k=0)),
    ({"top_k": 0, "top_p": 1.0}, SamplingParams()),
    ({"do_sample": False, "temperature": 0.6, "top_k": 20}, SamplingParams(temperature=0.0, top_k=20)),
    ({"do_sample": True, "temperature": 0.6, "min_p": 0.0}, SamplingParams(temperature=0.6)),
    ({"temperature": None, "top_p": None}, SamplingParams()),
    (
        {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05},
        SamplingParams(top_p=0.8, min_p=0.1, repetition_penalty=1.05),
    ),
    ({"typical_p": 0.9, "repetition_penalty": None}, SamplingParams(typical_p=0.9)),
    (
        {"repetition_penalty": 2, "max_new_tokens": 9, "length_penalty": 2.0, "num_beams": 4},
        SamplingParams(repetition_penalty=2.0),
    ),
]


@pytest.mark.parametrize(("values", "found"), GENERATED)
def test_what_has_a_plain_meaning_is_served(values: Values, found: SamplingParams, tmp_path: Path) -> None:
    write(tmp_path, truthful("LlamaForCausalLM"))
    assert read_config(write(tmp_path, values, "generation_config.json")).defaults == found


UNMEANT = [
    ({"top_k": -2}, "top_k is -2; it must be a whole number from -1 to 2147483647"),
    ({"top_k": "50"}, "top_k is '50'; it must be a whole number"),
    ({"top_p": 0.0}, r"top_p: 0\.0 is not in \(0, 1\]"),
    ({"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
    ({"temperature": 1e4}, r"temperature: 10000\.0 is not in \[0\.0, 100\.0\]"),
    ({"repetition_penalty": 0}, r"repetition_penalty: 0\.0 is not in \[1e-30, 100\.0\]"),
    ({"repetition_penalty": "1.1"}, r"repetition_penalty is '1\.1'; it must be a finite number"),
    ({"typical_p": 0.0}, r"typical_p: 0\.0 is not in \(0, 1\]"),
    ({"do_sample": "false"}, "do_sample is 'false'; it must be true or false"),
    ({"eos_token_id": [2, 111]}, r"eos_token_id is \[2, 111\]; it must be one or more ids from 0 to 110"),
]


@pytest.mark.parametrize(("values", "said"), UNMEANT)
def test_a_default_that_every_request_would_be_refused_for_is_refused_at_start(
    values: Values, said: str, tmp_path: Path
) -> None:
    write(tmp_path, truthful("LlamaForCausalLM"))
    write(tmp_path, values, "generation_config.json")
    with pytest.raises(ServiceError, match=rf"generation_config\.json: {said}"):
        read_config(tmp_path)


RELATED = [
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads, 4"),
    ({"head_dim": None, "hidden_size": 3}, "head_dim is 0; it must be a multiple of 2 from 2 to 4096"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}}, "high_freq_factor is 4.0; it mu"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; it must be a number from 1"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; it must be a number from 1"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5; it must be a number from 0."),
    ({"use_sliding_window": "false"}, "use_sliding_window is 'false'; it must be true or false"),
    ({"eos_token_id": list(range(111)) * 2 + [111]}, "eos_token_id is .*; it must be one or more ids from 0 to 110"),
    ({"max_position_embeddings": 10**7 * 2}, "max_position_embeddings is 20000000; it must be a whole number from 1"),
]


@pytest.mark.parametrize(("changes", "said"), RELATED)
def test_fields_that_do_not_go_together_are_named(changes: Values, said: str, tmp_path: Path) -> None:
    values = {**truthful("MistralForCausalLM"), **changes}
    with pytest.raises(ServiceError, match=rf"config\.json: .*{said}"):
        read_config(write(tmp_path, values))


def computes(directory: Path, config: ModelConfig) -> bool:
    """Whether the checkpoint loads and computes; False if it is refused."""
    try:
        model = load_model(directory, config, torch.float32, CPU, min(config.context_length, 64))
    except ServiceError as error:
        assert "\n" not in error.message
        return False
    num = min(6, config.context_length)
    ids = torch.arange(num)
    meta = AttentionMetadata.build([num], [num], np.array([[0]], dtype=np.int32), 8, CPU)
    assert bool(model.logits(model.forward(ids, ids, model.new_cache(1, 8), meta)).isfinite().all())
    return True


SHAPES = {
    "llama": (),
    "qwen2": (("use_sliding_window", True), ("sliding_window", 10), ("max_window_layers", 1)),
    "gemma2": (("sliding_window", 10),),
    "gpt_oss": (("num_local_experts", 4), ("num_experts_per_tok", 2), ("sliding_window", 10)),
}


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_what_is_read_computes_numbers_or_is_refused_by_its_tensors(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name, options=SHAPES[name]))
    base: Values = json.loads((tmp_path / "config.json").read_text())
    read, num_served = {read_served(tmp_path)}, 0
    for _, values in lies(copy.deepcopy(base), FIELDS):
        if not refusal(lambda values=values: read_served(write(tmp_path, values))):  # type: ignore[misc] # bound now
            config = read_served(tmp_path)
            if config not in read:
                read.add(config)
                num_served += computes(tmp_path, config)
    assert num_served > 3


@pytest.mark.parametrize(
    "added", [None, [], {}, {"12": {"content": "[IMG_BREAK]"}}, {"12": 3}, {"x": {"content": "[IMG_BREAK]"}}], ids=str
)
def test_ids_between_lines_are_read_or_refused_by_a_line(added: object, tmp_path: Path) -> None:
    write(tmp_path, TRUTHFUL_BROKEN_VISION)
    write(tmp_path, {"added_tokens_decoder": added}, "tokenizer_config.json")
    assert "tokenizer_config.json: added_tokens_decoder" in refusal(lambda: read_vision(tmp_path))
