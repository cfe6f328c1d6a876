"""Typed getters over the metadata of a GGUF file; errors name file, key and value."""

import struct
from typing import TypeVar, cast

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.fields import MENDING, invalid_model, shown
from sluice_server.engine.models.gguf.reader import GgufHeader, Value

T = TypeVar("T", int, str)


class Metadata:
    """The metadata of a file. Keys that begin with a dot belong to the architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = self.string("general.architecture")

    def has(self, key: str) -> bool:
        """Returns whether the key exists."""
        return self._key(key) in self.header.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number."""
        value = self._get(key, default)
        if type(value) is not int:
            raise self.must_be(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number: the shortest one that is the same in float32, as the file's is rounded to that."""
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise self.must_be(key, "a number")
        return shortest(float(cast("float", value)))

    def boolean(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.must_be(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """Returns a string."""
        value = self._get(key, default)
        if type(value) is not str:
            raise self.must_be(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Returns an array of strings."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        """Returns an array of whole numbers."""
        return self._list(key, int)

    def numbers(self, key: str) -> list[float]:
        """Returns an array of numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(one) in (int, float) for one in value):
            raise self.must_be(key, "an array of numbers")
        return [float(one) for one in value]

    def must_be(self, key: str, what: str) -> ServiceError:
        """Returns the error for a value that is not `what`."""
        name = self._key(key)
        found = f"is {shown(self.header.metadata[name])}" if self.has(key) else "is missing"
        return self.wrong(f"{name} {found}; it must be {what}: {MENDING}")

    def wrong(self, message: str) -> ServiceError:
        """Returns the error MODEL_INVALID for the file."""
        return invalid_model(self.header.path, message)

    def _list(self, key: str, kind: type[T]) -> list[T]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(one) is kind for one in value):
            raise self.must_be(key, "an array of strings" if kind is str else "an array of whole numbers")
        return cast("list[T]", value)

    def _get(self, key: str, default: Value | None) -> Value | None:
        return self.header.metadata.get(self._key(key), default)

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key


def shortest(value: float) -> float:
    """Returns the number of fewest digits that equals `value` in float32; `value` itself if it is no float32."""
    try:
        if struct.unpack("<f", struct.pack("<f", value))[0] != value:
            return value
    except OverflowError:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(one for one in candidates if struct.pack("<f", one) == struct.pack("<f", value))
