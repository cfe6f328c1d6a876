"""Reads the vision towers of Qwen2.5-VL and Qwen3-VL. Depends on the standard library only.

Their images have any size: a token is a square of patches, as many as the picture has.
"""

import dataclasses
import math
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.by_layer import read_ropes
from sluice_server.engine.models.fields import MENDING, Fields, Json
from sluice_server.engine.models.rules import RULES
from sluice_server.engine.models.text_model import text_fields
from sluice_server.engine.models.vision.shared_config import (
    MOST_TOKENS,
    activation_of,
    check_colours,
    check_halves,
    heads_of,
    theta_of,
)

_BOTH: Mapping[str, Json] = {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
_ASSUMED: Mapping[str, Json] = {
    **_BOTH,
    **{"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16},
    **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
_ASSUMED_3: Mapping[str, Json] = {
    **_BOTH,
    **{"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16},
    **{"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
}


@dataclasses.dataclass(frozen=True, slots=True)
class QwenTower:
    """What the configurations of these towers share.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        patch_size: pixels of a side of a patch.
        merged: patches of a side of what is one token.
        frames: pictures that a patch spans in time; one picture counts as so many equal ones.
        activation: of the layers, by its name in `kernels.reference.encoders`.
        theta: base of the rotary embedding.
    """

    image_token_id: int
    patch_size: int
    merged: int
    frames: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    theta: float

    @property
    def dim(self) -> int:
        """Numbers of a head."""
        return self.hidden_size // self.num_heads

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return ImageForm(self.image_token_id, self.patch_size * self.merged, MOST_TOKENS, patch=self.patch_size)


@dataclasses.dataclass(frozen=True, slots=True)
class Qwen25Vision:
    """The configuration of Qwen2.5-VL's tower.

    Attributes:
        window: tokens of a side of the windows in which most layers attend.
        full: numbers of the layers that attend to the whole image, from 0.
    """

    tower: QwenTower
    window: int
    full: frozenset[int]

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return self.tower.form


@dataclasses.dataclass(frozen=True, slots=True)
class Qwen3Vision:
    """The configuration of Qwen3-VL's tower.

    Attributes:
        side: of the square of positions that have an embedding; between them, and for other shapes, it is interpolated.
        deep: numbers of the layers, from 0, behind which rows are made too, for the first layers of the text model.
    """

    tower: QwenTower
    side: int
    deep: tuple[int, ...]

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return self.tower.form


def read_qwen2_5(whole: Fields) -> Qwen25Vision:
    """Reads a config.json. Raises ServiceError, naming file, field and value."""
    raw, found = _read(whole, "Qwen2_5_VLForConditionalGeneration", _ASSUMED, interleaved=False)
    size, cell = raw.integer("window_size"), found.patch_size * found.merged
    if size < cell:
        raise raw.wrong("window_size", f"is {size}, less than the {cell} pixels of a token: {MENDING}")
    return Qwen25Vision(found, size // cell, frozenset(_layers(raw, "fullatt_block_indexes")))


def read_qwen3(whole: Fields) -> Qwen3Vision:
    """Reads a config.json. Raises ServiceError, naming file, field and value."""
    raw, found = _read(whole, "Qwen3VLForConditionalGeneration", _ASSUMED_3, interleaved=True)
    num = raw.integer("num_position_embeddings")
    if math.isqrt(num) ** 2 != num:
        raise raw.must_be("num_position_embeddings", "a square")
    deep = _layers(raw, "deepstack_visual_indexes")
    if len(set(deep)) < len(deep) or any(one >= found.num_layers for one in deep):
        raise raw.must_be("deepstack_visual_indexes", f"layers below {found.num_layers}, each once")
    return Qwen3Vision(found, math.isqrt(num), deep)


def _read(
    whole: Fields, architecture: str, assumed: Mapping[str, Json], *, interleaved: bool
) -> tuple[Fields, QwenTower]:
    """Returns the fields of a tower, and what all have."""
    text = Fields(whole.path, text_fields(architecture, whole)[1])
    raw = Fields(whole.path, {**assumed, **whole.within("vision_config").values}, "vision_config.")
    hidden = raw.integer("hidden_size")
    heads = heads_of(raw, "num_heads", hidden)
    _check_text(raw, text, interleaved=interleaved)
    check_halves(raw, "num_heads", hidden // heads)
    for name in ("in_channels", "in_chans"):
        check_colours(raw, name)
    return raw, QwenTower(
        image_token_id=whole.integer("image_token_id", 151_655),
        patch_size=raw.integer("patch_size"),
        merged=raw.integer("spatial_merge_size"),
        frames=raw.integer("temporal_patch_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("depth"),
        num_heads=heads,
        activation=activation_of(raw, "hidden_act", "silu"),
        theta=theta_of(raw),
    )


def _check_text(tower: Fields, text: Fields, *, interleaved: bool) -> None:
    """Raises ServiceError unless the tower's rows are as wide as the text model's hidden states, and that has positions
    in three directions."""
    width, hidden = tower.integer("out_hidden_size"), text.integer("hidden_size")
    if width != hidden:
        raise tower.wrong("out_hidden_size", f"is {width}, and hidden_size is {hidden}: {MENDING}")
    rope = read_ropes(text)[0]
    if not rope.sections:
        raise unsupported("mrope_section", "images without rope_parameters.mrope_section are not supported")
    if rope.interleaved != interleaved:
        text_of = f"is {str(rope.interleaved).lower()}; images of this model need {str(interleaved).lower()}"
        raise text.wrong("rope_parameters.mrope_interleaved", f"{text_of}: {MENDING}")


def _layers(tower: Fields, name: str) -> tuple[int, ...]:
    """Returns a list of layers' numbers, from 0."""
    found = tower.values.get(name)
    if not isinstance(found, list) or not all(RULES[name].holds(one) for one in found):
        raise tower.must_be(name, f"a list, {RULES[name]} each")
    return tuple(one for one in found if isinstance(one, int))
