"""Typed getters over a checkpoint's JSON file; errors name file, field, value and rule. Standard library only."""

import json
import os
import reprlib
from pathlib import Path
from typing import TypeAlias, cast

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.rules import RULES

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
MAX_JSON_BYTES = 64 << 20  # the index of the largest checkpoints has 10 MiB
MENDING = "correct the file, or download it again"
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


def invalid_model(path: Path, message: str) -> ServiceError:
    """Returns the error MODEL_INVALID, for a checkpoint that cannot be served."""
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", f"{path}: {message}")


def unreadable(path: Path, error: OSError) -> ServiceError:
    """Returns the error MODEL_INVALID for a file that is there and may not be read, or whose device fails."""
    return invalid_model(path, f"cannot be read by this process (user id {os.geteuid()}): {error.strerror}")


def shown(value: object) -> str:
    """Returns a value of a file for an error message, shortened to a few words."""
    return _brief.repr(value)


class Fields:
    """A JSON object with typed getters whose errors name file, field and value."""

    def __init__(self, path: Path, values: dict[str, Json], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def wrong(self, name: str, message: str) -> ServiceError:
        return invalid_model(self.path, f"{self._prefix}{name} {message}")

    def must_be(self, name: str, what: object) -> ServiceError:
        """Returns the error for a value that is not `what`."""
        return self.wrong(name, f"is {shown(self.values.get(name))}; it must be {what}: {MENDING}")

    def within(self, name: str) -> "Fields":
        """Returns the object under that name."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.must_be(name, "an object")
        return Fields(self.path, value, f"{self._prefix}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer, checked by its rule; null counts as absent."""
        value = self.values.get(name)
        if value is None and default is not None:
            value = default
        if not RULES[name].holds(value):
            shown_as = Fields(self.path, {name: value}, self._prefix)
            raise shown_as.must_be(name, RULES[name])
        return cast("int", value)

    def number(self, name: str, default: float) -> float:
        """Returns a number, checked by its rule; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if not RULES[name].holds(value):
            raise self.must_be(name, RULES[name])
        return float(cast("float", value))

    def maybe(self, name: str) -> float | None:
        """Returns a number, checked by its rule, or None if absent."""
        return None if self.values.get(name) is None else self.number(name, 0.0)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.must_be(name, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self.must_be(name, "a string")
        return value


def read_json(path: Path) -> dict[str, Json]:
    """Returns the object in a JSON file. Raises ServiceError MODEL_INVALID if it is missing or holds anything else."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise invalid_model(path, f"does not hold a JSON object: {MENDING}")
    return value


def read_any_json(path: Path) -> Json:
    """Returns the value in a JSON file. Raises ServiceError MODEL_INVALID if it is missing or cannot be read."""
    try:
        os.lstat(path)
    except PermissionError as error:  # of the directory
        raise unreadable(path, error) from error
    except (OSError, ValueError):  # ValueError: a name that no file can have
        text = "is missing; a checkpoint directory holds config.json, tokenizer.json and *.safetensors"
        raise invalid_model(path, text) from None
    if not is_file(path):
        raise invalid_model(path, "is no file, or a link to none: download it again")
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise invalid_model(path, f"has {size} bytes; at most {MAX_JSON_BYTES} are read: {MENDING}")
    try:
        return cast("Json", json.loads(path.read_text(encoding="utf-8")))
    except RecursionError:
        raise invalid_model(path, f"is nested too deeply: {MENDING}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise invalid_model(path, f"cannot be read as JSON ({type(error).__name__}): {MENDING}") from error


def is_file(path: Path) -> bool:
    """Returns whether a regular file is there: opening a pipe or a device might block for ever."""
    return os.path.isfile(path)  # unlike `Path.is_file`, False for names that no file can have
