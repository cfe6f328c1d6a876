"""Reads the vision towers of Qwen2.5-VL. Depends on the standard library only.

Their images have any size: a token is a square of patches, as many as the picture has.
"""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.by_layer import read_ropes
from sluice_server.engine.models.fields import MENDING, Fields, Json
from sluice_server.engine.models.rules import RULES
from sluice_server.engine.models.text_model import text_fields
from sluice_server.engine.models.vision.shared_config import activation_of, check_colours, heads_of

MOST_TOKENS = 16_384  # of an image, unless the preprocessor's file says fewer
_ASSUMED: Mapping[str, Json] = {
    **{"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16},
    **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
    **{"out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]},
}


@dataclasses.dataclass(frozen=True, slots=True)
class QwenVision:
    """The configuration of a tower.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        patch_size: pixels of a side of a patch.
        merged: patches of a side of what is one token.
        frames: pictures that a patch spans in time; one picture counts as so many equal ones.
        window: tokens of a side of the windows in which most layers attend.
        full: numbers of the layers that attend to the whole image, from 0.
        activation: of the layers, by its name in `kernels.reference.encoders`.
        theta: base of the rotary embedding.
    """

    image_token_id: int
    patch_size: int
    merged: int
    frames: int
    window: int
    full: frozenset[int]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    theta: float

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return ImageForm(self.image_token_id, self.patch_size * self.merged, MOST_TOKENS, patch=self.patch_size)


def read_qwen2_5(whole: Fields) -> QwenVision:
    """Reads a config.json. Raises ServiceError, naming file, field and value."""
    text = Fields(whole.path, text_fields("Qwen2_5_VLForConditionalGeneration", whole)[1])
    nested = whole.within("vision_config")
    tower = Fields(whole.path, {**_ASSUMED, **nested.values}, "vision_config.")
    hidden, patch, merged = (
        tower.integer("hidden_size"),
        tower.integer("patch_size"),
        tower.integer("spatial_merge_size"),
    )
    heads = heads_of(tower, "num_heads", hidden)
    check_text(tower, text)
    check_halves(tower, hidden // heads)
    for name in ("in_channels", "in_chans"):
        check_colours(tower, name)
    window = tower.integer("window_size") // merged // patch
    if not window:
        few = f"is {tower.integer('window_size')}, less than the {patch * merged} pixels of a token: {MENDING}"
        raise tower.wrong("window_size", few)
    return QwenVision(
        image_token_id=whole.integer("image_token_id", 151_655),
        patch_size=patch,
        merged=merged,
        frames=tower.integer("temporal_patch_size"),
        window=window,
        full=layers_of(tower, "fullatt_block_indexes"),
        hidden_size=hidden,
        intermediate_size=tower.integer("intermediate_size"),
        num_layers=tower.integer("depth"),
        num_heads=heads,
        activation=activation_of(tower, "hidden_act", "silu"),
        theta=theta_of(tower),
    )


def check_text(tower: Fields, text: Fields) -> None:
    """Raises ServiceError unless the tower's rows are as wide as the text model's hidden states, and that has positions
    in three directions."""
    width, hidden = tower.integer("out_hidden_size"), text.integer("hidden_size")
    if width != hidden:
        raise tower.wrong("out_hidden_size", f"is {width}, and hidden_size is {hidden}: {MENDING}")
    if not read_ropes(text)[0].sections:
        raise unsupported("mrope_section", "images need rope_parameters.mrope_section, which the file does not have")


def check_halves(tower: Fields, dim: int) -> None:
    """Raises ServiceError unless rows turn one half of a head, and columns the other, in pairs."""
    if dim % 4:
        raise tower.wrong("num_heads", f"makes heads of {dim} numbers; they must be a multiple of 4: {MENDING}")


def theta_of(tower: Fields) -> float:
    """Returns the base of the tower's rotary embedding."""
    if tower.values.get("rope_parameters") is None:
        return 10_000.0
    return tower.within("rope_parameters").number("rope_theta", 10_000.0)


def layers_of(tower: Fields, name: str) -> frozenset[int]:
    """Returns a list of layers' numbers, from 0."""
    found = tower.values.get(name)
    if not isinstance(found, list) or not all(RULES[name].holds(one) for one in found):
        raise tower.must_be(name, f"a list, {RULES[name]} each")
    return frozenset(one for one in found if isinstance(one, int))
