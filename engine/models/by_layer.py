"""What a checkpoint's config.json says of its layers one by one: sliding windows, and how positions are rotated.

Stdlib only. Takes the file as data, gives values; errors name file, field and value.
"""

import dataclasses
from typing import cast

from sluice_server.engine.models.fields import MENDING, Fields, Json, shown

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
FULL, WINDOWED = "full_attention", "sliding_attention"
PARAMETERS = (  # of scalings, by `engine.models.rules`
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
# Of two parameters of a scaling the first must be the greater one: their names and what they are where they are absent.
ORDERED = {
    "llama3": (("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
    "yarn": (("beta_fast", 32.0), ("beta_slow", 1.0)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and one of the scalings default, linear, llama3, yarn with its parameters."""

    theta: float = 10_000.0
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def get(self, name: str, default: float | None = None) -> float:
        """A parameter of the scaling. Raises KeyError when it is absent and has no default."""
        found = dict(self.parameters)
        return found[name] if default is None else found.get(name, default)


def read_ropes(raw: Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """Of all layers, and of those with a window where it is another.

    Three spellings: rope_parameters by kind of layer (newest) or for all, rope_theta with rope_scaling (oldest).
    """
    raw.number("partial_rotary_factor", 1.0)
    newer = raw.values.get("rope_parameters")
    if isinstance(newer, dict) and newer.keys() & {FULL, WINDOWED}:
        full = _rope(raw, newer.get(FULL), f"rope_parameters.{FULL}", "rope_theta")
        return full, _rope(raw, newer.get(WINDOWED), f"rope_parameters.{WINDOWED}", "rope_local_base_freq")
    rope = _rope(raw, newer if newer is not None else raw.values.get("rope_scaling"), "rope_parameters", "rope_theta")
    if raw.values.get("rope_local_base_freq") is None:
        return rope, None
    return rope, _rope(raw, None, "", "rope_local_base_freq")


def _rope(raw: Fields, scaling: Json, name: str, theta_field: str) -> RopeConfig:
    """`scaling` is what the file has under `name`; `theta_field` holds the base where that does not."""
    if scaling is not None and not isinstance(scaling, dict):
        raise raw.wrong(name, f"is {shown(scaling)}; it must be an object: {MENDING}")
    own = Fields(raw.path, scaling or {}, f"{name}.")
    kind = own.values.get("rope_type", own.values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise own.wrong("rope_type", f"is {shown(kind)}; supported are {', '.join(ROPE_KINDS)}")
    theta = own.maybe("rope_theta")
    own.number("partial_rotary_factor", 1.0)
    found = {field: value for field in PARAMETERS if (value := own.maybe(field)) is not None}
    if kind != "default" and "factor" not in found:
        raise own.wrong("factor", f"is missing; {kind} scaling needs it: {MENDING}")
    _check_order(own, str(kind), found)
    if "truncate" in own.values:
        found["truncate"] = float(own.boolean("truncate", True))
    base = raw.number(theta_field, 10_000.0) if theta is None else theta
    return RopeConfig(base, str(kind), tuple(found.items()))


def _check_order(own: Fields, kind: str, found: dict[str, float]) -> None:
    """Raises ServiceError where what is between two wavelengths, or two numbers of rotations, is nothing."""
    if kind not in ORDERED:
        return
    (upper, most), (lower, least) = ORDERED[kind]
    high, low = found.get(upper, most), found.get(lower, least)
    if high <= low:
        raise own.wrong(upper, f"is {high}; it must be above {lower}, which is {low}: {MENDING}")


def read_windows(raw: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Per layer, from layer_types or a pattern where given, else from sliding_window and the Qwen switches."""
    if raw.values.get("use_bidirectional_attention") not in (None, False):
        raise raw.wrong("use_bidirectional_attention", "is set; supported is false")
    kinds = _kinds(raw, num_layers)
    window = raw.values.get("sliding_window")
    if not raw.boolean("use_sliding_window", True):
        return (None,) * num_layers
    if window is None:
        if kinds is not None and WINDOWED in kinds:
            raise raw.wrong("sliding_window", f"is null; layers of {WINDOWED} need one")
        return (None,) * num_layers
    size = raw.integer("sliding_window")
    if kinds is not None:
        return tuple(size if kind == WINDOWED else None for kind in kinds)
    if "use_sliding_window" in raw.values:
        full = raw.integer("max_window_layers", num_layers)
        return tuple(None if layer < full else size for layer in range(num_layers))
    return (size,) * num_layers


def _kinds(raw: Fields, num_layers: int) -> list[str] | None:
    """What attention each layer has; None where the file does not say. Of a pattern of n the n-th layers see all."""
    kinds = raw.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise raw.must_be("layer_types", "a list")
        if len(kinds) != num_layers:
            raise raw.wrong("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
        other = next((kind for kind in kinds if kind not in (FULL, WINDOWED)), None)
        if other is not None:
            raise raw.wrong("layer_types", f"names {shown(other)}; supported are {FULL}, {WINDOWED}")
        return cast("list[str]", kinds)
    if raw.values.get("sliding_window_pattern") is None:
        return None
    pattern = raw.integer("sliding_window_pattern")
    return [WINDOWED if num % pattern else FULL for num in range(1, num_layers + 1)]
