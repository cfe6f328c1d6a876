"""Reads what a checkpoint's config.json says of its vision tower. Depends on the standard library only."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.errors import ServiceError, unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import MENDING, Fields, Json, read_json, shown

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}  # name in files → name in `kernels.reference.encoders`
WITH_IMAGES = ("LlavaForConditionalGeneration",)
# Fields that files leave out, with the defaults of transformers' classes, by model_type of vision_config.
_ASSUMED: Mapping[str, Mapping[str, Json]] = {
    "clip_vision_model": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 32, "num_channels": 3, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    },
    "siglip_vision_model": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-6},
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_CLIP = "clip_vision_model"
_CHANNELS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class VisionConfig:
    """The configuration of a vision tower and of the projector behind it.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        image_size: pixels of a side; images are square.
        patch_size: pixels of a side of a patch.
        num_layers: layers that are computed; a file may have more, whose output nothing reads.
        activation, projector_activation: names in `kernels.reference.encoders`.
        is_clip: whether the tower is CLIP's, with a class token and a norm behind its embeddings; else SigLIP's.
        keeps_class: whether the class token is a token of the image.
        projector_bias: whether the projector's matrices have biases.
    """

    image_token_id: int
    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    projector_activation: str
    is_clip: bool
    keeps_class: bool
    projector_bias: bool = True

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Tokens that the tower computes for an image."""
        return self.num_patches + self.is_clip

    @property
    def num_tokens(self) -> int:
        """Tokens of an image in a prompt."""
        return self.num_patches + (self.is_clip and self.keeps_class)

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        return ImageForm(self.image_token_id, self.num_tokens, 4 * _CHANNELS * self.image_size**2)


def read_vision(directory: Path) -> VisionConfig:
    """Reads a checkpoint directory. Raises ServiceError, naming file, field and value."""
    path = directory / "config.json"
    whole = Fields(path, read_json(path))
    named = whole.values.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in WITH_IMAGES:
        text = f"images for {shown(named)} are not supported; they are for {', '.join(WITH_IMAGES)}"
        raise unsupported("architectures", text)
    nested = whole.within("vision_config")
    kind = nested.string("model_type", _CLIP)
    if kind not in _ASSUMED:
        text = f"vision_config.model_type {shown(kind)} is not supported; supported are {', '.join(_ASSUMED)}"
        raise unsupported("model_type", text)
    tower = Fields(path, {**_ASSUMED[kind], **nested.values})
    hidden, heads = tower.integer("hidden_size"), tower.integer("num_attention_heads")
    if hidden % heads:
        raise tower.wrong("num_attention_heads", f"is {heads}, which does not divide hidden_size, {hidden}: {MENDING}")
    size, patch = tower.integer("image_size"), tower.integer("patch_size")
    if size % patch:
        raise tower.wrong("patch_size", f"is {patch}, which does not divide image_size, {size}: {MENDING}")
    if tower.integer("num_channels") != _CHANNELS:
        raise tower.must_be("num_channels", "3: red, green and blue")
    selected = whole.string("vision_feature_select_strategy", "default")
    if selected not in ("default", "full"):
        raise whole.must_be("vision_feature_select_strategy", "default or full")
    found = VisionConfig(
        image_token_id=whole.integer("image_token_index", whole.integer("image_token_id", 32_000)),
        image_size=size,
        patch_size=patch,
        hidden_size=hidden,
        intermediate_size=tower.integer("intermediate_size"),
        num_layers=_num_layers(whole, tower.integer("num_hidden_layers")),
        num_heads=heads,
        norm_eps=tower.number("layer_norm_eps", 1e-5),
        activation=_activation(tower, "hidden_act", "gelu"),
        projector_activation=_activation(whole, "projector_hidden_act", "gelu"),
        is_clip=kind == _CLIP,
        keeps_class=selected == "full",
        projector_bias=whole.boolean("multimodal_projector_bias", True),
    )
    if not found.is_clip and not found.keeps_class:
        raise _first_patch(whole)
    return found


def _num_layers(whole: Fields, most: int) -> int:
    """Returns the layers behind which the projector reads; a negative number counts from the last."""
    chosen = whole.values.get("vision_feature_layer", -2)
    if isinstance(chosen, list):
        text = f"vision_feature_layer {shown(chosen)}: several layers are not supported; one is"
        raise unsupported("vision_feature_layer", text)
    if type(chosen) is not int or not -most - 1 <= chosen <= most:
        raise whole.must_be("vision_feature_layer", f"one number from {-most - 1} to {most}")
    return chosen if chosen >= 0 else most + 1 + chosen


def _activation(raw: Fields, name: str, default: str) -> str:
    value = raw.string(name, default)
    if value not in ACTIVATIONS:
        raise unsupported(name, f"{name} {shown(value)} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _first_patch(whole: Fields) -> ServiceError:
    """Returns the error of a file that drops the class token of a tower without one: it would drop a patch."""
    text = "is 'default', which drops a class token, and this vision tower has none: write 'full'"
    return whole.wrong("vision_feature_select_strategy", text)
