"""A JSON file of a checkpoint as data: typed getters whose errors name file, field and value. Stdlib only."""

import json
from pathlib import Path
from typing import TypeAlias, cast

from engine.errors import Code, ServiceError

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def invalid_model(path: Path, message: str) -> ServiceError:
    """A checkpoint that cannot be served."""
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", f"{path}: {message}")


class Fields:
    """A JSON object with typed getters whose errors name file, field and value."""

    def __init__(self, path: Path, values: dict[str, Json], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def wrong(self, name: str, message: str) -> ServiceError:
        return invalid_model(self.path, f"{self._prefix}{name} {message}")

    def within(self, name: str) -> "Fields":
        """The object under that name."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, f"is {value!r}; it must be an object")
        return Fields(self.path, value, f"{self._prefix}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, f"is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, f"is {value!r}; it must be a number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"is {value!r}; it must be true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self.values.get(name) or default
        if not isinstance(value, str):
            raise self.wrong(name, f"is {value!r}; it must be a string")
        return value


def read_json(path: Path) -> dict[str, Json]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise invalid_model(
            path, "is missing; a checkpoint directory holds config.json, tokenizer.json and *.safetensors"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise invalid_model(path, f"cannot be read as JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise invalid_model(path, "does not hold a JSON object")
    return cast("dict[str, Json]", value)
