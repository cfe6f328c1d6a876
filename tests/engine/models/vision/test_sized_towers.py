"""Towers for images of any size: rows equal to transformers', whatever the shape, and in any order."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.images import Grid
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.models.vision.encoding import Encoder
from sluice_server.engine.models.vision.loading import load_vision
from tests.oracle.image_families import FAMILIES, IMAGE_ID, QWEN2_5, Family, Picture

WIDTH = 64  # of the text model
GRIDS: tuple[Grid, ...] = ((1, 1), (4, 4), (3, 5), (1, 7), (6, 2))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    """Returns the tower of a checkpoint."""
    return load_vision(path, read_vision(path), WIDTH, dtype, torch.device("cpu"))


@torch.inference_mode()
def features(family: Family, reference: Any, picture: Picture) -> torch.Tensor:  # noqa: ANN401 # untyped
    """The rows that the reference gives the ids of an image, with those of each depth."""
    found = reference.get_image_features(**family.given([picture, picture]))  # it fails for a single token
    deep = found.deepstack_features if "deepstack_features" in found else ()
    ids = torch.tensor(family.ids(picture.grid))
    rows = reference.get_input_embeddings().weight[ids]
    rows[ids == IMAGE_ID] = found.pooler_output[0]
    return torch.cat([rows, *(one[0] for one in deep)], dim=1)


@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_rows_equal_transformers(family: Family, as_published: bool, tmp_path: Path) -> None:
    reference, ours = family.make(tmp_path, as_published=as_published), load(tmp_path)
    for seed, grid in enumerate(GRIDS):
        picture = family.picture(seed, grid)
        got, want = ours.encode(picture.numbers, grid), features(family, reference, picture)
        assert got.shape == want.shape == (len(family.ids(grid)), ours.width)
        assert float((got - want).abs().max()) < 1e-4 * max(1.0, float(want.abs().max())), grid


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_an_image_has_the_same_bits_in_any_order(family: Family, tmp_path: Path) -> None:
    family.make(tmp_path)
    ours, pictures = load(tmp_path), [family.picture(seed, grid) for seed, grid in enumerate(GRIDS)]
    first = [ours.encode(one.numbers, one.grid) for one in pictures]
    again = [ours.encode(one.numbers, one.grid) for one in reversed(pictures)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_bfloat16_is_near(family: Family, tmp_path: Path) -> None:
    reference, picture = family.make(tmp_path), family.picture(1, (3, 5))
    got, want = (
        load(tmp_path, torch.bfloat16).encode(picture.numbers, (3, 5)),
        features(family, reference, picture),
    )
    assert float((got - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize(
    ("tower", "code", "says"),
    [
        ({"window_size": 4}, Code.FAILED_PRECONDITION, "vision_config.window_size is 4, less than the 8 pixels"),
        ({"num_heads": 5}, Code.FAILED_PRECONDITION, "does not divide hidden_size"),
        ({"num_heads": 16}, Code.FAILED_PRECONDITION, "a multiple of 4"),
        ({"out_hidden_size": 32}, Code.FAILED_PRECONDITION, "out_hidden_size is 32, and hidden_size is 64"),
        ({"in_chans": 1}, Code.FAILED_PRECONDITION, "red, green and blue"),
        ({"fullatt_block_indexes": [-1]}, Code.FAILED_PRECONDITION, "fullatt_block_indexes"),
        ({"fullatt_block_indexes": 3}, Code.FAILED_PRECONDITION, "a list"),
        ({"hidden_act": "swish"}, Code.UNIMPLEMENTED, "quick_gelu"),
        ({"rope_parameters": {"rope_theta": 0}}, Code.FAILED_PRECONDITION, "rope_theta"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tower: dict[str, Any], code: Code, says: str, tmp_path: Path) -> None:
    changed(tmp_path, tower, {})
    with pytest.raises(ServiceError) as caught:
        read_vision(tmp_path)
    assert caught.value.code is code and says in caught.value.message


def test_images_need_positions_in_three_directions(tmp_path: Path) -> None:
    changed(tmp_path, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    with pytest.raises(ServiceError, match="mrope_section"):
        read_vision(tmp_path)


def changed(path: Path, tower: dict[str, Any], text: dict[str, Any]) -> None:
    """Writes the config.json of a checkpoint with other fields."""
    QWEN2_5.config().save_pretrained(path)
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    raw["vision_config"] |= tower
    raw["text_config"] |= text
    file.write_text(json.dumps(raw))
