"""Defines the options of `LLM`: those of `sluice serve` for model, tokenizer and engine, from the same two tables."""

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks.here import check_cores

OF_SERVICE = frozenset(
    {
        "model",
        "revision",
        "max_prompt_bytes",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "trust_chat_content",
        "allow_shared_cores",
    }
)  # others: processes, network, telemetry
# Options of an engine that are for servers alone, and their values here: a batch is queued as a whole, in the order of
# the policy, no router reads what the cache holds, there is no other engine, its prompts are texts or ids, and nothing
# resizes its cache.
OF_SERVER: dict[str, Any] = {
    **{"max_queued_requests": sys.maxsize, "max_queued_tokens": sys.maxsize},
    **{"kv_events": False, "shared_cache_bytes": 0, "kv_store": "", "enable_prompt_embeds": False},
    **{"kv_cache_max_tokens": 0, "kv_cache_min_tokens": 0},
}


class OfflineConfig(NamedTuple):
    """The engine's and the service's configuration, validated."""

    engine: EngineConfig
    service: ServiceConfig


def fields() -> dict[str, "dataclasses.Field[Any]"]:
    """Returns every option by name."""
    own = [field for field in dataclasses.fields(ServiceConfig) if field.name in OF_SERVICE]
    engines = [field for field in dataclasses.fields(EngineConfig) if field.name not in OF_SERVER]
    return {field.name: field for field in (*own, *engines)}


def settings_of(options: Mapping[str, object]) -> OfflineConfig:
    """Builds and checks the settings.

    Raises TypeError for an unknown name or a value of the wrong type, ServiceError for a value out of range.
    """
    known = fields()
    for name in options:
        if name not in known:
            raise TypeError(_unknown(name, known))
    given = {name: _typed(known[name], value) for name, value in options.items()}
    engine = EngineConfig(**OF_SERVER, **{name: value for name, value in given.items() if name not in OF_SERVICE})
    service = ServiceConfig(**{name: value for name, value in given.items() if name in OF_SERVICE})
    check(engine, service)
    check_cores(engine, service)
    return OfflineConfig(engine, service)


def _typed(field: "dataclasses.Field[Any]", value: object) -> Any:  # noqa: ANN401 # of the field's type
    if field.type is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if field.type is float and type(value) is int:
        value = float(value)
    if type(value) is not field.type:
        wanted = getattr(field.type, "__name__", field.type)
        raise TypeError(f"{field.name}: {value!r} is not {wanted}; {field.metadata['help']}")
    return value


def _unknown(name: str, known: Mapping[str, object]) -> str:
    if name in OF_SERVER or name in {field.name for field in dataclasses.fields(ServiceConfig)}:
        return f"{name!r} is an option of `sluice serve` alone: it concerns no model, tokenizer or engine"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{name!r} is no option; {hint}"
