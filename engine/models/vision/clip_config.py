"""Reads vision towers of CLIP's form, for images of one size: CLIP's and SigLIP's. Needs the standard library only."""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.images import Grid
from sluice_server.engine.models.fields import MENDING, Fields, Json, shown
from sluice_server.engine.models.vision.shared_config import activation_of, check_colours, heads_of

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
# Fields that files leave out, with the defaults of transformers' classes, by model_type of vision_config.
_ASSUMED: Mapping[str, Mapping[str, Json]] = {
    CLIP: {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 32, "num_channels": 3, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    },
    SIGLIP: {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-6},
        "hidden_act": "gelu_pytorch_tanh",
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class ClipConfig:
    """The configuration of a tower.

    Attributes:
        image_size: pixels of a side; images are square.
        patch_size: pixels of a side of a patch.
        num_layers: that the file has.
        activation: name in `kernels.reference.encoders`.
        is_clip: whether the tower is CLIP's, with a class token and a norm behind its embeddings; else SigLIP's.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    is_clip: bool

    @property
    def patches(self) -> Grid:
        """Rows and columns of an image's patches."""
        return (self.image_size // self.patch_size,) * 2

    @property
    def num_positions(self) -> int:
        """Tokens that the tower computes for an image."""
        return self.patches[0] * self.patches[1] + self.is_clip


def read_clip(nested: Fields, default: str, kinds: tuple[str, ...] = tuple(_ASSUMED)) -> ClipConfig:
    """Reads a vision_config, whose model_type is `default` if it names none, and one of `kinds`. Raises ServiceError,
    naming file, field and value."""
    kind = nested.string("model_type", default)
    if kind not in kinds:
        text = f"vision_config.model_type {shown(kind)} is not supported; supported are {', '.join(kinds)}"
        raise unsupported("model_type", text)
    tower = Fields(nested.path, {**_ASSUMED[kind], **nested.values})
    hidden = tower.integer("hidden_size")
    heads = heads_of(tower, "num_attention_heads", hidden)
    size, patch = tower.integer("image_size"), tower.integer("patch_size")
    if size % patch:
        raise tower.wrong("patch_size", f"is {patch}, which does not divide image_size, {size}: {MENDING}")
    check_colours(tower, "num_channels")
    return ClipConfig(
        image_size=size,
        patch_size=patch,
        hidden_size=hidden,
        intermediate_size=tower.integer("intermediate_size"),
        num_layers=tower.integer("num_hidden_layers"),
        num_heads=heads,
        norm_eps=tower.number("layer_norm_eps", 1e-5),
        activation=activation_of(tower, "hidden_act", "gelu"),
        is_clip=kind == CLIP,
    )
