"""Vision towers: rows and tokens equal to transformers', and nothing of one image in another's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.models.vision.encoding import Encoder
from sluice_server.engine.models.vision.loading import load_vision
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.oracle.vision_checkpoints import IMAGE_ID, TOWERS, features, make_llava

CPU = torch.device("cpu")
WIDTH = 64  # of the text model


def load(path: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    """Returns the tower of a checkpoint."""
    return load_vision(path, read_vision(path), WIDTH, dtype, CPU)


def random_pixels(seed: int) -> torch.Tensor:
    """Returns the pixels of an image."""
    return torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("tower", list(TOWERS))
def test_rows_equal_transformers(tower: str, as_published: bool, tmp_path: Path) -> None:
    oracle = make_llava(tmp_path, tower, as_published=as_published)
    ours = load(tmp_path)
    for seed in range(3):
        got, want = ours.encode(random_pixels(seed), (4, 4)), features(oracle, random_pixels(seed))
        assert got.shape == (read_vision(tmp_path).form.most_tokens, WIDTH) == tuple(want.shape)
        assert float((got - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize(
    "fields",
    [
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 2},
        {"vision_feature_layer": -5},
        {"vision_feature_select_strategy": "full"},
        {"multimodal_projector_bias": False},
        {"projector_hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=str,
)
def test_fields_of_the_file_decide(fields: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_llava(tmp_path, "clip", **fields)
    got, want = load(tmp_path).encode(random_pixels(1), (4, 4)), features(oracle, random_pixels(1))
    assert got.shape == want.shape
    assert float((got - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))


def test_an_image_has_the_same_bits_in_any_order(tmp_path: Path) -> None:
    make_llava(tmp_path, "clip")
    ours = load(tmp_path)
    first = [ours.encode(random_pixels(seed), (4, 4)) for seed in range(4)]
    again = [ours.encode(random_pixels(seed), (4, 4)) for seed in reversed(range(4))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_bfloat16_is_near(tmp_path: Path) -> None:
    oracle = make_llava(tmp_path, "clip")
    got, want = load(tmp_path, torch.bfloat16).encode(random_pixels(1), (4, 4)), features(oracle, random_pixels(1))
    assert float((got - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("tower", list(TOWERS))
def test_greedy_tokens_behind_two_images_equal_transformers(tower: str, chunk: int, tmp_path: Path) -> None:
    oracle, pixels = make_llava(tmp_path, tower), [random_pixels(1), random_pixels(2)]
    vision, model = load(tmp_path), load_model(tmp_path, read_served(tmp_path), torch.float32, CPU)
    num = read_vision(tmp_path).form.most_tokens
    ids = [5, 6, 7, *[IMAGE_ID] * num, 8, 9, *[IMAGE_ID] * num, 10]
    rows = torch.zeros(len(ids), WIDTH)
    for first, image in zip((3, 5 + num), pixels, strict=True):
        rows[first : first + num] = vision.encode(image, (4, 4))
    prompt, at = len(ids), 0
    got: list[torch.Tensor] = []
    cache, tables = model.new_cache(12, 8), np.arange(12, dtype=np.int32)[None]
    while len(got) < 8:
        end = min(len(ids), at + chunk)
        meta = AttentionMetadata.build([end - at], [end], tables, 8, CPU)
        given = [(i - at, rows[i : i + 1]) for i in range(at, min(end, prompt)) if ids[i] == IMAGE_ID]
        hidden = model.forward(torch.tensor(ids[at:end]), torch.arange(at, end), cache, meta, given=given)
        at = end
        if at == len(ids):
            got.append(model.logits(hidden[-1:])[0])
            ids.append(int(got[-1][:IMAGE_ID].argmax()))
    with torch.inference_mode():
        want = oracle(torch.tensor([ids]), pixel_values=torch.stack(pixels)).logits[0, prompt - 1 : -1]
    assert float((torch.stack(got) - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))
    assert ids[prompt:] == want[:, :IMAGE_ID].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, Code.UNIMPLEMENTED, "images for ['LlamaForCausalLM']"),
        ({"architectures": []}, Code.UNIMPLEMENTED, "LlavaForConditionalGeneration"),
        ({"vision_feature_layer": [-2, -1]}, Code.UNIMPLEMENTED, "several layers"),
        ({"vision_feature_layer": -6}, Code.FAILED_PRECONDITION, "-5 to 4"),
        ({"vision_feature_layer": 5}, Code.FAILED_PRECONDITION, "-5 to 4"),
        ({"vision_feature_select_strategy": "last"}, Code.FAILED_PRECONDITION, "default or full"),
        ({"projector_hidden_act": "swish"}, Code.UNIMPLEMENTED, "quick_gelu"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], code: Code, says: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, fields, {}, code, says)


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model_type": "dinov2"}, Code.UNIMPLEMENTED, "siglip_vision_model"),
        ({"num_attention_heads": 5}, Code.FAILED_PRECONDITION, "does not divide hidden_size"),
        ({"patch_size": 5}, Code.FAILED_PRECONDITION, "does not divide image_size"),
        ({"num_channels": 1}, Code.FAILED_PRECONDITION, "red, green and blue"),
        ({"model_type": "siglip_vision_model"}, Code.FAILED_PRECONDITION, "drops a class token"),
    ],
    ids=str,
)
def test_towers_that_are_not_supported_are_refused_by_name(
    fields: dict[str, Any], code: Code, says: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, {}, fields, code, says)


def check_refused(path: Path, fields: dict[str, Any], tower: dict[str, Any], code: Code, says: str) -> None:
    """Changes fields of a checkpoint's config.json, and asserts that it is refused."""
    make_llava(path, "clip")
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw = {**raw, **fields, "vision_config": {**raw["vision_config"], **tower}}
    file.write_text(json.dumps(raw))
    with pytest.raises(ServiceError) as caught:
        read_vision(path)
    assert caught.value.code is code
    assert says in caught.value.message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_llava(tmp_path, "clip")
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["vision_config"]["num_hidden_layers"] = 6
    file.write_text(json.dumps(raw))
    with pytest.raises(ServiceError) as caught:
        load(tmp_path)
    assert "vision_tower.encoder.layers.4" in caught.value.message
