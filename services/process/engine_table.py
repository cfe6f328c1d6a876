"""The engines of a ring: from `--engine-peers`, or from the file of `--engines-file`, which is read again when it
changes. So engines join and leave while the other processes run.

    [engines.engine-0]
    address = "tcp://10.0.0.7:7003"

    [engines.engine-1]
    address = "tcp://10.0.0.8:7003"
    draining = true
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import MAX_ENGINES, ServiceConfig, bad_setting, parse_peers
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import private
from sluice_server.services.process.watched import WatchedFile

MAX_FILE_BYTES = 64 << 10
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SCHEMES = ("tcp://", "ipc://")
_FIELDS = {"address": str, "draining": bool}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine of the table. `draining`: it gets no new requests and finishes those that it has."""

    address: str
    draining: bool = False


EngineTable: TypeAlias = Mapping[str, EngineEntry]


def parse_table(text: str, *, has_keys: bool = True) -> EngineTable:
    """Returns the table of a file's text. Raises ServiceError naming what is wrong in it; `has_keys`: whether this
    process has CURVE keys, which TCP needs."""
    import tomllib  # which a process without such a file does without

    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # an id that stands twice, too
        raise _bad(f"is no TOML ({error})") from None
    engines = found.pop("engines", None)
    if found:
        raise _bad(f"has {', '.join(sorted(found))}; it takes [engines.ID] only")
    if not isinstance(engines, dict) or not engines:
        raise _bad("lists no engine: [engines.ID] with address")
    if len(engines) > MAX_ENGINES:
        raise _bad(f"lists {len(engines)} engines; at most {MAX_ENGINES} are in one ring")
    table = {name: _entry(name, fields, has_keys=has_keys) for name, fields in engines.items()}
    at: dict[str, str] = {}
    for name, entry in table.items():
        if entry.address in at:
            raise _bad(f"{at[entry.address]} and {name} have one address, {entry.address}")
        at[entry.address] = name
    if all(entry.draining for entry in table.values()):
        raise _bad("every engine is draining, so that none would get new requests; leave one as it is")
    return table


def _entry(name: str, fields: object, *, has_keys: bool) -> EngineEntry:
    if not _ID.fullmatch(name):
        raise _bad(f"{name!r} is no id: letters, digits, and ._- behind the first, at most 64")
    if not isinstance(fields, dict):
        raise _bad(f"{name} is no table: [engines.{name}] with address")
    for field, value in fields.items():
        if field not in _FIELDS:
            raise _bad(f"{name} has {field}; it takes {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[field]):
            raise _bad(f"{name}: {field} is {value!r}, and not of type {_FIELDS[field].__name__}")
    address = fields.get("address", "")
    if not address.startswith(_SCHEMES) or "," in address:
        raise _bad(f"{name}: address {address!r} is not tcp://host:port or ipc://path")
    if address.startswith("tcp://") and not has_keys:
        raise _bad(f"{name}: {address} needs --ring-keys: TCP is always encrypted")
    return EngineEntry(**fields)


def _bad(message: str) -> ServiceError:
    return bad_setting("engines_file", message)


def write_table(path: Path, table: EngineTable) -> None:
    """Replaces a file by this table. Raises OSError."""
    lines = []
    for name, entry in table.items():
        lines += [f"[engines.{json.dumps(name)}]", f"address = {json.dumps(entry.address)}"]
        lines += ["draining = true"] * entry.draining
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(private.open_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    fresh.replace(path)


def engines_of(config: ServiceConfig) -> WatchedFile[EngineTable]:
    """Returns the engines that the settings name; without a file they never change. Raises ServiceError."""
    if config.engines_file and config.engine_peers:
        raise bad_setting("engines_file", "and --engine-peers exclude each other: leave one of the two out")
    if not config.engines_file:
        peers = parse_peers(Role.ENGINE, config.engine_peers)
        return WatchedFile((), lambda: {name: EngineEntry(address) for name, address in peers.items()})
    path = Path(config.engines_file)
    return WatchedFile((path,), lambda: _read(path, has_keys=bool(config.ring_keys)))


def no_engines() -> WatchedFile[EngineTable]:
    """Returns an empty table that never changes."""
    return WatchedFile((), dict)


def _read(path: Path, *, has_keys: bool) -> EngineTable:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _bad(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _bad(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse_table(data.decode(), has_keys=has_keys)
    except UnicodeDecodeError as error:
        raise _bad(f"{path} is no UTF-8 ({error.reason})") from None
    except ServiceError as error:
        raise _bad(f"{path} {error.message.partition(': ')[2]}") from None
