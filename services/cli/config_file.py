"""Reads the file of `--config`: YAML or TOML, with the names of the command line. Unknown names are refused.

YAML is read with PyYAML's safe loader, which makes plain values only.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import bad_setting

MAX_BYTES = 1 << 20
TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", tuple: "text or a list of texts"}


def read(path: Path, settings: Mapping[str, type], words: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Returns the values of the file by the names of `settings`, which has the type of each. `words`: what some numbers
    may be written as.

    Raises ServiceError naming the file and the place for a file that cannot be read, a name that is no setting and a
    value of another type.
    """
    found: dict[str, Any] = {}
    for written, value in _parsed(path).items():
        name = written.replace("-", "_")
        if name not in settings:
            raise _bad(path, f"{written!r} is no option of serve{_nearest(written, settings)}")
        if name in found:
            raise _bad(path, f"{written!r} stands there twice")
        is_word = isinstance(value, str) and value in words.get(name, ())
        found[name] = value if is_word else _checked(path, written, value, settings[name])
    return found


def _parsed(path: Path) -> dict[str, object]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise bad_setting("config", f"cannot read {path}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise _bad(path, f"has more than {MAX_BYTES} bytes")
    try:
        if path.suffix == ".toml":
            import tomllib  # as YAML's parser, for those who have such a file

            parsed: object = tomllib.loads(raw.decode())
        elif path.suffix in (".yaml", ".yml"):
            parsed = _yaml(raw.decode())
        else:
            raise bad_setting("config", f"{path} ends neither in .yaml, .yml nor .toml")
    except (ValueError, RecursionError) as error:
        raise _bad(path, " ".join(str(error).split())) from None
    if parsed is None:  # an empty YAML file
        return {}
    if not isinstance(parsed, dict) or not all(isinstance(name, str) for name in parsed):
        raise _bad(path, "is no list of `name: value`")
    return parsed


def _yaml(text: str) -> object:
    """Returns the contents. Raises ValueError, also for a name that stands twice, of which PyYAML takes the last."""
    import yaml  # here, as few commands are given a file

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    names = [name.value for name, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} stands there twice")
    return value


def _checked(path: Path, written: str, value: object, wanted: type) -> object:
    """Returns the value in the form of the command line's options. Raises ServiceError for one of another type."""
    if wanted is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    if wanted is tuple and isinstance(value, str):
        return [value]
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        hint = "; put it in quotes" if wanted is str and isinstance(value, (int, float)) else ""
        raise _bad(path, f"{written}: {value!r} is not {TYPES[wanted]}{hint}")
    return value


def _nearest(written: str, settings: Mapping[str, type]) -> str:
    names = [name.replace("_", "-") for name in settings]
    near = difflib.get_close_matches(written.replace("_", "-"), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `sluice serve --help` lists them"


def _bad(path: Path, message: str) -> ServiceError:
    return bad_setting("config", f"{path}: {message}")
