"""Gemma 3's tower: rows equal to transformers', and what is not supported is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.vision.config import read_vision
from tests.engine.models.vision.test_sized_towers import load
from tests.oracle.image_families import BREAKS, GEMMA3, GEMMA3_GRID, IMAGE_ID, OTHER_ID


@pytest.mark.parametrize("as_published", [True, False])
@torch.inference_mode()
def test_rows_equal_transformers(as_published: bool, tmp_path: Path) -> None:
    reference, ours = GEMMA3.make(tmp_path, as_published=as_published), load(tmp_path)
    for seed in range(3):
        picture = GEMMA3.picture(seed, GEMMA3_GRID)
        got = ours.encode(picture.numbers, GEMMA3_GRID)
        (want,) = reference.get_image_features(**GEMMA3.given([picture])).pooler_output
        assert got.shape == want.shape == (16, ours.width)
        assert float((got - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))


def test_its_form_is_that_of_its_files(tmp_path: Path) -> None:
    changed(tmp_path, {}, {}, {})
    form = read_vision(tmp_path).form
    assert (form.token_id, form.around, form.grid) == (IMAGE_ID, (OTHER_ID, BREAKS[0]), GEMMA3_GRID)
    assert form.is_whole and form.cell * 4 == 32 and form.ids(GEMMA3_GRID) == (IMAGE_ID,) * 16


@pytest.mark.parametrize(
    ("whole", "tower", "text", "code", "says"),
    [
        ({}, {}, {"sliding_window": 15}, Code.UNIMPLEMENTED, "15 is less than the 16 tokens of an image"),
        ({"mm_tokens_per_image": 15}, {}, {}, Code.FAILED_PRECONDITION, "the square of a number that divides 8"),
        ({"mm_tokens_per_image": 9}, {}, {}, Code.FAILED_PRECONDITION, "mm_tokens_per_image is 9"),
        ({"boi_token_index": -1}, {}, {}, Code.FAILED_PRECONDITION, "boi_token_index"),
        ({}, {"model_type": "clip_vision_model"}, {}, Code.UNIMPLEMENTED, "siglip_vision_model"),
        ({}, {"patch_size": 5}, {}, Code.FAILED_PRECONDITION, "does not divide image_size"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    whole: dict[str, Any], tower: dict[str, Any], text: dict[str, Any], code: Code, says: str, tmp_path: Path
) -> None:
    changed(tmp_path, whole, tower, text)
    with pytest.raises(ServiceError) as caught:
        read_vision(tmp_path)
    assert caught.value.code is code and says in caught.value.message


def changed(path: Path, whole: dict[str, Any], tower: dict[str, Any], text: dict[str, Any]) -> None:
    """Writes the config.json of a checkpoint with other fields."""
    GEMMA3.config().save_pretrained(path)
    file = path / "config.json"
    raw = json.loads(file.read_text()) | {"architectures": ["Gemma3ForConditionalGeneration"]} | whole
    raw["vision_config"] |= tower
    raw["text_config"] |= text
    file.write_text(json.dumps(raw))
