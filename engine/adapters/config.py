"""Parses an adapter's adapter_config.json (PEFT's LoraConfig) as data into one frozen value.

Standard library only. A field that would change answers and is not built raises ServiceError UNIMPLEMENTED naming it;
so does a field of a later PEFT that is set to anything.
"""

import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import TypeAlias, cast

from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.engine.models.fields import Json, shown

CONFIG = "adapter_config.json"
MAX_RANK = 256
Fields: TypeAlias = dict[str, Json]

# What a file may say without a change of what is computed: who made it, and how it was trained.
HARMLESS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
    *("lora_dropout", "layers_pattern", "megatron_core", "runtime_config", "eva_config", "loftq_config"),
    *("corda_config", "lora_ga_config", "ensure_weight_tying", "qalora_group_size"),
)
READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"),
    *("exclude_modules", "layers_to_transform", "init_lora_weights"),
)
# Of `init_lora_weights`: the others begin by changing the base's weights, so the adapter belongs to another base.
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
PLAIN_NAME = re.compile(r"\^?[A-Za-z0-9_.]{1,200}")


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter_config.json says of the shapes and the scale of an adapter.

    Attributes:
        rank, alpha: of modules that no pattern names.
        ranks, alphas: rank_pattern and alpha_pattern; the first key that is a module's name, or its end, counts.
        is_rank_stabilised: whether products are scaled by alpha / √rank (Kalajdzievski 2023), not alpha / rank.
        targets: names of modules, or their ends, each of which the adapter must have; None where the file does not
            list them.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilised: bool
    targets: tuple[str, ...] | None

    def rank_of(self, module: str) -> int:
        """Returns the rank of the module with that name."""
        return next((rank for key, rank in self.ranks.items() if is_named(module, key)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B · A in the module with that name."""
        alpha = next((alpha for key, alpha in self.alphas.items() if is_named(module, key)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def is_named(module: str, key: str) -> bool:
    """Returns whether a key of a file names a module: by all of its name, or by its end from a dot on."""
    whole = key.removeprefix("^")
    return module == whole or (key == whole and module.endswith(f".{key}"))


def invalid_adapter(message: str) -> ServiceError:
    """Returns the error ADAPTER_INVALID, for a folder whose files are no adapter of the base."""
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_INVALID", message, field="adapter")


def parse_config(text: bytes) -> AdapterConfig:
    """Returns the config of an adapter from the bytes of its file.

    Raises ServiceError ADAPTER_INVALID naming field and value, and UNIMPLEMENTED for what is not built.
    """
    values = _object(text)
    _check_built(values)
    return AdapterConfig(
        rank=_rank(values.get("r"), "r"),
        alpha=_alpha(values.get("lora_alpha"), "lora_alpha"),
        ranks={key: _rank(value, f"rank_pattern.{key}") for key, value in _pattern(values, "rank_pattern")},
        alphas={key: _alpha(value, f"alpha_pattern.{key}") for key, value in _pattern(values, "alpha_pattern")},
        is_rank_stabilised=_flag(values, "use_rslora"),
        targets=_targets(values),
    )


def _object(text: bytes) -> Fields:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_adapter(f"{CONFIG} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise invalid_adapter(f"{CONFIG} does not hold a JSON object")
    return cast("Fields", values)


def _check_built(values: Fields) -> None:
    """Raises ServiceError for a kind of adapter that is not built."""
    if values.get("peft_type") != "LORA":
        raise _not_built("peft_type", values, "LORA")
    if values.get("bias", "none") != "none":
        raise _not_built("bias", values, "none")
    start = values.get("init_lora_weights")
    if isinstance(start, dict | list | int | float) and not isinstance(start, bool):
        raise _must_be("init_lora_weights", start, "true, false or a name")
    if start not in KEEPS_BASE:
        raise _not_built("init_lora_weights", values, "true: this one changed the weights of its base")
    for name, value in values.items():
        if name not in HARMLESS and name not in READ and value:
            raise _not_built(shown(name).strip("'\""), values, "null or false")


def _not_built(name: str, values: Fields, supported: str) -> ServiceError:
    text = f"{CONFIG}: {name} is {shown(values.get(name))}; adapters are supported with {supported}"
    return unsupported("adapter", text)


def _must_be(name: str, value: object, what: str) -> ServiceError:
    return invalid_adapter(f"{CONFIG}: {name} is {shown(value)}; it must be {what}")


def _rank(value: Json, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _must_be(name, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(value: Json, name: str) -> float:
    if type(value) not in (int, float) or not -1e6 <= cast("float", value) <= 1e6 or value == 0:
        raise _must_be(name, value, "a number from -1000000 to 1000000 other than 0")
    return float(cast("float", value))


def _flag(values: Fields, name: str) -> bool:
    value = values.get(name) or False
    if not isinstance(value, bool):
        raise _must_be(name, value, "true or false")
    return value


def _pattern(values: Fields, name: str) -> Collection[tuple[str, Json]]:
    """Returns the entries of rank_pattern or alpha_pattern: names of modules only, not the regular expressions that
    PEFT allows, as these can take hours to match."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise _must_be(name, found, "an object")
    for key in found:
        if not PLAIN_NAME.fullmatch(key):
            raise unsupported("adapter", f"{CONFIG}: {name} has the key {shown(key)}; keys must be names of modules")
    return found.items()


def _targets(values: Fields) -> tuple[str, ...] | None:
    """Returns the modules that the file must hold; None where other fields say which, by rules or expressions."""
    found = values.get("target_modules")
    if isinstance(found, list):
        if not found or not all(isinstance(one, str) and one for one in found):
            raise _must_be("target_modules", found, "a list of names")
        whole = not values.get("exclude_modules") and values.get("layers_to_transform") is None
        return tuple(cast("list[str]", found)) if whole else None
    if found is not None and not isinstance(found, str):
        raise _must_be("target_modules", found, "a name or a list of names")
    return None
