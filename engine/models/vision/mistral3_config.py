"""Reads the vision tower of Mistral 3, Pixtral's, and the projector behind it. Depends on the standard library only."""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import MENDING, Fields, Json, read_json
from sluice_server.engine.models.text_model import text_fields
from sluice_server.engine.models.vision.shared_config import (
    MOST_TOKENS,
    activation_of,
    check_colours,
    check_halves,
    chosen_layers,
    heads_of,
    theta_of,
)

TOKENS = "tokenizer_config.json"
_ROW_END, _END = "[IMG_BREAK]", "[IMG_END]"
_ASSUMED: Mapping[str, Json] = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"patch_size": 14, "num_channels": 3, "hidden_act": "gelu"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Mistral3Vision:
    """The configuration of a tower and of the projector behind it.

    Attributes:
        image_token_id: the id that stands in a prompt for each token of an image.
        breaks: the ids behind a row of tokens, and behind the last.
        patch_size: pixels of a side of a patch.
        merged: patches of a side of what is one token.
        num_layers: layers that are computed; a file may have more, whose output nothing reads.
        activation, projector_activation: names in `kernels.reference.encoders`.
        theta: base of the rotary embedding.
        norm_eps: of the projector's norm.
        has_bias: whether the projector's last matrices have biases.
        vocab_size: of the text model.
    """

    image_token_id: int
    breaks: tuple[int, int]
    patch_size: int
    merged: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    projector_activation: str
    theta: float
    norm_eps: float
    has_bias: bool
    vocab_size: int

    @property
    def form(self) -> ImageForm:
        """The form of images that requests bring."""
        cell = self.patch_size * self.merged
        return ImageForm(self.image_token_id, cell, MOST_TOKENS, patch=self.patch_size, breaks=self.breaks)


def read_mistral3(whole: Fields) -> Mistral3Vision:
    """Reads a config.json, and the ids between an image's rows from tokenizer_config.json beside it. Raises
    ServiceError, naming file, field and value."""
    text = Fields(whole.path, text_fields("Mistral3ForConditionalGeneration", whole)[1])
    tower = Fields(whole.path, {**_ASSUMED, **whole.within("vision_config").values}, "vision_config.")
    hidden, vocab = tower.integer("hidden_size"), text.integer("vocab_size")
    heads = heads_of(tower, "num_attention_heads", hidden)
    check_halves(tower, "num_attention_heads", hidden // heads)
    check_colours(tower, "num_channels")
    return Mistral3Vision(
        image_token_id=whole.integer("image_token_index", whole.integer("image_token_id", 10)),
        breaks=_breaks(whole, vocab),
        patch_size=tower.integer("patch_size"),
        merged=whole.integer("spatial_merge_size", 2),
        hidden_size=hidden,
        intermediate_size=tower.integer("intermediate_size"),
        num_layers=chosen_layers(whole, tower.integer("num_hidden_layers"), default=-1),
        num_heads=heads,
        activation=activation_of(tower, "hidden_act", "gelu"),
        projector_activation=activation_of(whole, "projector_hidden_act", "gelu"),
        theta=theta_of(tower),
        norm_eps=text.number("rms_norm_eps", 1e-5),
        has_bias=whole.boolean("multimodal_projector_bias", False),
        vocab_size=vocab,
    )


def _breaks(whole: Fields, vocab: int) -> tuple[int, int]:
    path = whole.path.parent / TOKENS
    file = Fields(path, read_json(path))
    ids = {str(one.get("content")): name for name, one in _added(file).items() if isinstance(one, dict)}
    found = [ids.get(name, "") for name in (_ROW_END, _END)]
    if not all(one.isascii() and one.isdigit() and int(one) < vocab for one in found):
        text = f"names no ids below {vocab} for {_ROW_END} and {_END}: {MENDING}"
        raise file.wrong("added_tokens_decoder", text)
    return int(found[0]), int(found[1])


def _added(file: Fields) -> dict[str, Json]:
    found = file.values.get("added_tokens_decoder")
    if not isinstance(found, dict):
        raise file.must_be("added_tokens_decoder", "an object")
    return found
