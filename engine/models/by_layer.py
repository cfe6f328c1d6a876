"""Reads the per-layer fields of a checkpoint's config.json: sliding windows and rotary embeddings.

Takes the file as data, gives values; errors name file, field and value. Depends on the standard library only.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

from sluice_server.engine.models.fields import MENDING, Fields, Json, shown
from sluice_server.engine.models.rules import RULES

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
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
ORIGINAL = "original_max_position_embeddings"
# Pairs of parameters of which the first must be the greater one, with their defaults.
ORDERED = {
    "llama3": (("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
    "yarn": (("beta_fast", 32.0), ("beta_slow", 1.0)),
}


SHORT, LONG = "short_factor", "long_factor"  # of longrope: a divisor for each frequency, below and above a length


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and one of the scalings of `ROPE_KINDS` with its parameters.

    Attributes:
        partial: the share of a head that is rotated; the numbers behind it stay as they are.
        short_factors, long_factors: of longrope, a divisor for each frequency; empty otherwise.
        sections: how many frequencies turn by time, by row and by column, for tokens of images; empty where positions
            have one direction.
        interleaved: whether the sections take turns.
    """

    theta: float = 10_000.0
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()
    partial: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def get(self, name: str, default: float | None = None) -> float:
        """Returns a parameter of the scaling. Raises KeyError if it is absent and has no default."""
        found = dict(self.parameters)
        return found[name] if default is None else found.get(name, default)


def read_ropes(raw: Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rotary embedding of all layers, and that of layers with a window if it differs.

    Three spellings exist: rope_parameters by kind of layer (newest) or for all, rope_theta with rope_scaling (oldest).
    """
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
    if kind == "su" or (kind == "yarn" and SHORT in own.values):  # names of longrope in the first files of Phi-3
        kind = "longrope"
    if kind == "mrope":  # three positions for each token of an image, which are equal for text
        kind = "default"
    if kind not in ROPE_KINDS:
        raise own.wrong("rope_type", f"is {shown(kind)}; supported are {', '.join(ROPE_KINDS)}")
    theta = own.maybe("rope_theta")
    found = {field: value for field in PARAMETERS if (value := own.maybe(field)) is not None}
    if kind not in ("default", "longrope") and "factor" not in found:
        raise own.wrong("factor", f"is missing; {kind} scaling needs it: {MENDING}")
    _check_order(own, str(kind), found)
    original = raw.maybe(ORIGINAL)
    if original is not None:  # beside the scaling, where it takes precedence
        found[ORIGINAL] = original
    if "truncate" in own.values:
        found["truncate"] = float(own.boolean("truncate", True))
    base = raw.number(theta_field, 10_000.0) if theta is None else theta
    partial = own.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
    short, long = (_factors(own, name, kind == "longrope") for name in (SHORT, LONG))
    turns = _sections(own), own.boolean("mrope_interleaved", False)
    return RopeConfig(base, str(kind), tuple(found.items()), partial, short, long, *turns)


def _sections(own: Fields) -> tuple[int, ...]:
    """Returns the sections of rotary embeddings in three directions; none if the file has none."""
    found = own.values.get("mrope_section")
    if found is None:
        return ()
    if not isinstance(found, list) or len(found) != 3 or not all(RULES["mrope_section"].holds(one) for one in found):
        raise own.must_be("mrope_section", f"a list of three, {RULES['mrope_section']} each")
    return tuple(int(cast("int", one)) for one in found)


def _factors(own: Fields, name: str, is_needed: bool) -> tuple[float, ...]:
    """Returns longrope's divisors of frequencies."""
    found = own.values.get(name)
    if found is None and not is_needed:
        return ()
    if not isinstance(found, list) or not found or not all(RULES[name].holds(one) for one in found):
        raise own.must_be(name, f"a list, of {RULES[name]} each")
    return tuple(float(cast("float", one)) for one in found)


def check_rotary(raw: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Raises ServiceError if the rotated share of a head is no number of pairs, or has not one divisor for each."""
    size = int(head_dim * rope.partial)
    if size < 2 or size % 2:
        text = f"is {rope.partial}, which rotates {size} numbers of a head of {head_dim}: they must be pairs"
        raise raw.wrong("partial_rotary_factor", f"{text}: {MENDING}")
    for name, factors in ((SHORT, rope.short_factors), (LONG, rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != size // 2:
            text = f"has {len(factors)} numbers; {size} rotated numbers of a head need {size // 2}: {MENDING}"
            raise raw.wrong(f"rope_parameters.{name}", text)
    if rope.sections and sum(rope.sections) != head_dim // 2:
        text = f"is {list(rope.sections)}; its sum must be half of a head of {head_dim}: {MENDING}"
        raise raw.wrong("rope_parameters.mrope_section", text)


def read_rotated(raw: Fields, num_layers: int) -> tuple[bool, ...]:
    """Returns which layers rotate queries and keys: no_rope_layers has a 1 for these, else every n-th does not."""
    listed = raw.values.get("no_rope_layers")
    if listed is None:
        if raw.values.get("no_rope_layer_interval") is None:
            return (True,) * num_layers
        interval = raw.integer("no_rope_layer_interval")
        return tuple(num % interval != 0 for num in range(1, num_layers + 1))
    if not isinstance(listed, list) or not all(type(one) is int and one in (0, 1) for one in listed):
        raise raw.must_be("no_rope_layers", "a list of 0 and 1")
    if len(listed) < num_layers:
        raise raw.wrong("no_rope_layers", f"has {len(listed)} entries for {num_layers} layers: {MENDING}")
    return tuple(bool(one) for one in listed[:num_layers])


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


def _is_upper(layer: int, most: int, is_rotated: bool) -> bool:
    """Returns whether a layer has a window in Qwen2 and Qwen3: those behind the first max_window_layers."""
    return layer >= most


# By architecture, where a file names no kinds of layers: whether one has a window, from its number, max_window_layers
# and whether it rotates.
WINDOWED_LAYERS: Mapping[str, Callable[[int, int, bool], bool]] = {
    "Qwen2MoeForCausalLM": lambda layer, most, is_rotated: layer % 2 == 0 and layer < most,
    "SmolLM3ForCausalLM": lambda layer, most, is_rotated: not is_rotated,
}


def read_windows(raw: Fields, num_layers: int, architecture: str) -> tuple[int | None, ...]:
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
        most, rotated = raw.integer("max_window_layers", num_layers), read_rotated(raw, num_layers)
        has_window = WINDOWED_LAYERS.get(architecture, _is_upper)
        return tuple(size if has_window(layer, most, rotated[layer]) else None for layer in range(num_layers))
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
