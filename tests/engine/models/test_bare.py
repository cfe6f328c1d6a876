"""Checkpoints of models without a head: tensors without their prefix, classes without a head, attention both ways."""

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.request import Pooling
from tests.engine.test_engine_oracle import ROOMY, make_engine, some_prompts
from tests.engine.test_pooling import assert_equal, expected, pooled
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

SHAPES = [Shape("qwen3", tied=True), Shape("mistral"), Shape("gemma3", tied=True, options=(("sliding_window", 10),))]


def change(directory: Path, **fields: object) -> None:
    """Sets fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_a_decoder_saved_alone_gives_its_vectors(tmp_path: Path, shape: Shape) -> None:
    whole = make_checkpoint(tmp_path / "whole", shape)
    bare = tmp_path / "bare"
    inner = reference(whole).base_model
    assert isinstance(inner, transformers.PreTrainedModel)
    inner.save_pretrained(bare)
    assert json.loads((bare / "config.json").read_text())["architectures"][0].endswith("Model")
    config = read_config(bare)
    assert not config.generates and config.architecture == read_config(whole).architecture
    prompts = some_prompts(shape.vocab, 3)
    assert_equal(pooled(make_engine(bare, ROOMY), prompts, Pooling.LAST), expected(whole, prompts, Pooling.LAST))


def test_tensors_without_their_prefix_are_found_in_a_model_with_a_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published."""
    shape = Shape("qwen3", tied=True)
    directory = make_checkpoint(tmp_path, shape)
    path = directory / "model.safetensors"
    save_file({name.removeprefix("model."): one for name, one in load_file(path).items()}, path, {"format": "pt"})
    assert read_config(directory).generates
    prompts = some_prompts(shape.vocab, 3)
    oracle = make_checkpoint(tmp_path / "oracle", shape)
    assert_equal(pooled(make_engine(directory, ROOMY), prompts, Pooling.MEAN), expected(oracle, prompts, Pooling.MEAN))


@pytest.mark.parametrize(("field", "value"), [("use_bidirectional_attention", True), ("is_causal", False)])
def test_attention_to_later_tokens_is_refused_by_name(tmp_path: Path, field: str, value: bool) -> None:
    directory = make_checkpoint(tmp_path, Shape("qwen3"))
    change(directory, architectures=["Qwen3Model"], **{field: value})
    with pytest.raises(ServiceError, match=rf"{field} is (set|false); supported is"):
        read_config(directory)
