"""What the configurations of vision towers share: reading of activations, heads and colours. Standard library only."""

from collections.abc import Mapping

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import MENDING, Fields, shown

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}  # name in files → name in `kernels.reference.encoders`
CHANNELS = 3
MOST_TOKENS = 16_384  # of an image of any size, unless the preprocessor's file says fewer


def activation_of(raw: Fields, name: str, default: str) -> str:
    """Returns an activation, by the kernels' name."""
    value = raw.string(name, default)
    if value not in ACTIVATIONS:
        raise unsupported(name, f"{name} {shown(value)} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def heads_of(tower: Fields, name: str, hidden: int) -> int:
    """Returns the number of heads, which divides the hidden size."""
    heads = tower.integer(name)
    if hidden % heads:
        raise tower.wrong(name, f"is {heads}, which does not divide hidden_size, {hidden}: {MENDING}")
    return heads


def check_colours(tower: Fields, name: str) -> None:
    """Raises ServiceError unless images have three colours."""
    if tower.integer(name, CHANNELS) != CHANNELS:
        raise tower.must_be(name, "3: red, green and blue")


def check_halves(tower: Fields, name: str, dim: int) -> None:
    """Raises ServiceError unless rows turn one half of a head, and columns the other, in pairs."""
    if dim % 4:
        raise tower.wrong(name, f"makes heads of {dim} numbers; they must be a multiple of 4: {MENDING}")


def theta_of(tower: Fields) -> float:
    """Returns the base of the tower's rotary embedding, which files have in two places."""
    if tower.values.get("rope_parameters") is None:
        return tower.number("rope_theta", 10_000.0)
    return tower.within("rope_parameters").number("rope_theta", 10_000.0)


def chosen_layers(whole: Fields, most: int, default: int) -> int:
    """Returns the layers behind which the projector reads; a negative number counts from the last."""
    chosen = whole.values.get("vision_feature_layer", default)
    if isinstance(chosen, list):
        text = f"vision_feature_layer {shown(chosen)}: several layers are not supported; one is"
        raise unsupported("vision_feature_layer", text)
    if type(chosen) is not int or not -most - 1 <= chosen <= most:
        raise whole.must_be("vision_feature_layer", f"one number from {-most - 1} to {most}")
    return chosen if chosen >= 0 else most + 1 + chosen
