"""Reads the file of `--models`: the models that a service serves, each in processes of its own.

    default = "chat"                 # the model of requests that name none; else the first

    [models.chat-v1]                 # the id in requests
    source = "/models/chat-v1"       # as --model takes it; absent: the id
    revision = ""                    # as --revision takes it
    alias = "chat"                   # a further name
    pinned = true                    # is never unloaded to make room
    load = false                     # known, and loaded when somebody asks for it

    [models.chat-v1.settings]        # options of `sluice serve` for this model
    kv-cache-tokens = 65536

Pure, except for `read_models`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig, bad_setting
from sluice_server.services.process.model_table import OF_SERVICE, Options

MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 64
MAX_ID_BYTES = 256
_FIELDS: Mapping[str, type] = {
    "source": str,
    "revision": str,
    "alias": str,
    "pinned": bool,
    "load": bool,
    "settings": dict,
}
_KINDS: Mapping[type, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **{dict: "a table"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the file. `load`: whether it is loaded at the start."""

    id: str
    source: str
    revision: str = ""
    alias: str = ""
    pinned: bool = False
    load: bool = True
    options: Options = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelsFile:
    """The models by id, in the order of the file, and the name of the default."""

    models: Mapping[str, NamedModel]
    default: str


def read_models(path: Path) -> ModelsFile:
    """Returns the models of a file. Raises ServiceError naming what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _bad(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise _bad(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse_models(data.decode())
    except UnicodeDecodeError as error:
        raise _bad(f"{path} is no UTF-8 ({error.reason})") from None
    except ServiceError as error:
        raise _bad(f"{path} {error.message.partition(': ')[2]}") from None


def parse_models(text: str) -> ModelsFile:
    """Returns the models of a file's text. Raises ServiceError."""
    import tomllib  # which a service of one model does without

    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # an id that stands twice, too
        raise _bad(f"is no TOML ({error})") from None
    tables, default = found.pop("models", None), found.pop("default", "")
    if found:
        raise _bad(f"has {', '.join(sorted(found))}; it takes default and [models.ID]")
    if not isinstance(tables, dict) or not tables:
        raise _bad("lists no model: [models.ID] with source")
    if len(tables) > MAX_MODELS:
        raise _bad(f"lists {len(tables)} models; at most {MAX_MODELS} may be there")
    models = {name: _model(name, fields) for name, fields in tables.items()}
    _check_names(models)
    first = next((one for one in models.values() if one.load), None)
    if first is None:
        raise _bad("has load = false for every model, so that none would be served; leave one as it is")
    names = {name for one in models.values() if one.load for name in (one.id, one.alias) if name}
    if default not in ("", *names):
        raise _bad(f"default {default!r} is neither a model that is loaded nor the alias of one")
    return ModelsFile(models, default or first.alias or first.id)


def check_id(name: str, setting: str = "model") -> None:
    """Raises ServiceError for a name that no model can have."""
    if not 1 <= len(name.encode()) <= MAX_ID_BYTES or not name.isprintable() or ":" in name or name.strip() != name:
        text = f"{name[:64]!r} is no name of a model: 1 to {MAX_ID_BYTES} bytes that can be printed, without a colon"
        raise bad_setting(setting, text)


def checked_option(name: str, value: object) -> tuple[str, Any]:
    """Returns a setting of a model by its name in the code. Raises ServiceError for an unknown name, and for a value
    of another type."""
    key, wanted = _setting(name)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise bad_setting(key, f"{value!r} is not {_KINDS[wanted]}")
    return key, value


def parsed_option(name: str, text: str) -> tuple[str, Any]:
    """Returns a setting that is given as text. Raises ServiceError."""
    key, wanted = _setting(name)
    try:
        return key, {"true": True, "false": False}[text] if wanted is bool else wanted(text)
    except (ValueError, KeyError):
        raise bad_setting(key, f"{text[:64]!r} is not {_KINDS[wanted]}") from None


def _setting(name: str) -> tuple[str, Any]:
    """Returns a setting's name in the code, and its type. Raises ServiceError."""
    types = {field.name: field.type for field in dataclasses.fields(EngineConfig)}
    types |= {field.name: field.type for field in dataclasses.fields(ServiceConfig) if field.name in OF_SERVICE}
    key = name.replace("-", "_")
    if key not in types:
        import difflib  # for mistakes only

        near = difflib.get_close_matches(key, types, n=1)
        hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
        raise bad_setting(key[:64], f"is no setting that a model has of its own{hint}")
    return key, types[key]


def _model(name: str, fields: object) -> NamedModel:
    check_id(name, "models")
    if not isinstance(fields, dict):
        raise _bad(f"{name} is no table: [models.{name}] with source")
    for field, value in fields.items():
        if field not in _FIELDS:
            raise _bad(f"{name} has {field}; it takes {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[field]):
            raise _bad(f"{name}: {field} is {value!r}, and not {_KINDS[_FIELDS[field]]}")
    try:
        options: Options = dict(checked_option(key, value) for key, value in fields.get("settings", {}).items())
    except ServiceError as error:
        raise _bad(f"{name}: {error.message}") from None
    own = {key: value for key, value in fields.items() if key != "settings"}
    if own.get("alias"):
        check_id(own["alias"], "models")
    return NamedModel(**{"id": name, "source": name, **own, "options": options})


def _check_names(models: Mapping[str, NamedModel]) -> None:
    aliases: dict[str, str] = {}
    for one in models.values():
        if one.alias in models:
            raise _bad(f"{one.id}: alias {one.alias!r} is the id of a model; use another name")
        if one.alias in aliases:
            raise _bad(f"{aliases[one.alias]} and {one.id} have one alias, {one.alias}")
        if one.alias:
            aliases[one.alias] = one.id


def _bad(message: str) -> ServiceError:
    return bad_setting("models", message)
