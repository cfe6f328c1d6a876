"""Reads the vision tower of LLaVA-1.5 and models of its form. Depends on the standard library only."""

import dataclasses

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import Fields
from sluice_server.engine.models.vision.clip_config import CLIP, ClipConfig, read_clip
from sluice_server.engine.models.vision.shared_config import activation_of, chosen_layers


@dataclasses.dataclass(frozen=True, slots=True)
class LlavaVision:
    """The configuration of a tower of CLIP's form and of the projector behind it.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        num_layers: layers that are computed; a file may have more, whose output nothing reads.
        keeps_class: whether the class token is a token of the image.
        activation: the projector's, by its name in `kernels.reference.encoders`.
        has_bias: whether the projector's matrices have biases.
    """

    tower: ClipConfig
    image_token_id: int
    num_layers: int
    keeps_class: bool
    activation: str
    has_bias: bool = True

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        rows, columns = grid = self.tower.patches
        more = int(self.tower.is_clip and self.keeps_class)
        return ImageForm(self.image_token_id, self.tower.patch_size, rows * columns + more, grid=grid, num_more=more)


def read_llava(whole: Fields) -> LlavaVision:
    """Reads a config.json. Raises ServiceError, naming file, field and value."""
    tower = read_clip(whole.within("vision_config"), CLIP)
    selected = whole.string("vision_feature_select_strategy", "default")
    if selected not in ("default", "full"):
        raise whole.must_be("vision_feature_select_strategy", "default or full")
    if not tower.is_clip and selected != "full":
        raise _first_patch(whole)
    return LlavaVision(
        tower=tower,
        image_token_id=whole.integer("image_token_index", whole.integer("image_token_id", 32_000)),
        num_layers=chosen_layers(whole, tower.num_layers, default=-2),
        keeps_class=selected == "full",
        activation=activation_of(whole, "projector_hidden_act", "gelu"),
        has_bias=whole.boolean("multimodal_projector_bias", True),
    )


def _first_patch(whole: Fields) -> ServiceError:
    """Returns the error of a file that drops the class token of a tower without one: it would drop a patch."""
    text = "is 'default', which drops a class token, and this vision tower has none: write 'full'"
    return whole.wrong("vision_feature_select_strategy", text)
