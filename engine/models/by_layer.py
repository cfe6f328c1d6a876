"""Reads the per-layer fields of a checkpoint's config.json: sliding windows and rotary embeddings.

Takes the file as data, gives values; errors name file, field and value. Depends on the standard library only.
"""

import dataclasses
from typing import cast

from sluice_server.engine.models.fields import MENDING, Fields, Json, shown

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
FULL, WINDOWED = "full_attention", "sliding_attention"
PARAMETERS = (  # parameters of scalings; their ranges are in `engine.models.rules`
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
# Pairs of parameters of which the first must be the greater one, with their defaults.
ORDERED = {
    "llama3": (("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
    "yarn": (("beta_fast", 32.0), ("beta_slow", 1.0)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and one of the scalings default, linear, llama3, yarn with its parameters."""

    theta: float = 10_000.0
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def get(self, name: str, default: float | None = None) -> float:
        """Returns a parameter of the scaling. Raises KeyError if it is absent and has no default."""
        found = dict(self.parameters)
        return found[name] if default is None else found.get(name, default)


def read_ropes(raw: Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rotary embedding of all layers, and that of layers with a window if it differs.

    Three spellings exist: rope_parameters by kind of layer (newest) or for all, rope_theta with rope_scaling (oldest).
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
    """Reads one rotary embedding. `scaling` is the value of `name`; `theta_field` holds the base if that does not."""
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
    """Raises ServiceError if the bounds of an interpolation are not in order.

    They are two wavelengths or two numbers of rotations, see `ORDERED`.
    """
    if kind not in ORDERED:
        return
    (upper, most), (lower, least) = ORDERED[kind]
    high, low = found.get(upper, most), found.get(lower, least)
    if high <= low:
        raise own.wrong(upper, f"is {high}; it must be above {lower}, which is {low}: {MENDING}")


def read_windows(raw: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer.

    It follows from layer_types or a pattern if present, else from sliding_window and Qwen's fields.
    """
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
    """Returns the kind of attention of each layer, or None if the file has none.

    In a pattern of n every n-th layer has full attention.
    """
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
