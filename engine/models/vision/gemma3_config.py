"""Reads the vision tower of Gemma 3, SigLIP's, and the projector behind it. Depends on the standard library only."""

import dataclasses
import math
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import MENDING, Fields, Json
from sluice_server.engine.models.text_model import text_fields
from sluice_server.engine.models.vision.clip_config import SIGLIP, ClipConfig, read_clip

WINDOW = 4096  # of layers with one, where a file names none
# Of fields of the whole, where files leave them out.
_ASSUMED: Mapping[str, Json] = {
    **{"mm_tokens_per_image": 256, "image_token_index": 262_144},
    **{"boi_token_index": 255_999, "eoi_token_index": 256_000},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Gemma3Vision:
    """The configuration of a tower of SigLIP's form and of the projector behind it.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        around: the ids before an image's tokens and behind them; a chat template writes the first.
        side: tokens of a side of an image; each is the mean of a square of patches.
    """

    tower: ClipConfig
    image_token_id: int
    around: tuple[int, int]
    side: int

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return ImageForm(
            self.image_token_id,
            self.tower.image_size // self.side,
            self.side**2,
            grid=(self.side, self.side),
            around=self.around,
            is_whole=True,
        )


def read_gemma3(whole: Fields) -> Gemma3Vision:
    """Reads a config.json. Raises ServiceError, naming file, field and value."""
    text = Fields(whole.path, text_fields("Gemma3ForConditionalGeneration", whole)[1])
    given = {name: value for name, value in whole.values.items() if value is not None}
    raw = Fields(whole.path, {**_ASSUMED, **given})
    tower = read_clip(whole.within("vision_config"), SIGLIP, (SIGLIP,))
    num, patches = raw.integer("mm_tokens_per_image"), tower.patches[0]
    side = math.isqrt(num)
    if side**2 != num or patches % side:
        text_of = f"is {num}; it must be the square of a number that divides {patches}, the patches of a side"
        raise raw.wrong("mm_tokens_per_image", f"{text_of}: {MENDING}")
    if (window := text.integer("sliding_window", WINDOW)) < num:  # a token would not see all of its image
        message = f"sliding_window {window} is less than the {num} tokens of an image, which is not supported"
        raise unsupported("sliding_window", message)
    ids = [raw.integer(name) for name in ("image_token_index", "boi_token_index", "eoi_token_index")]
    return Gemma3Vision(tower, ids[0], (ids[1], ids[2]), side)
