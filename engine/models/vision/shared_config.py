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
