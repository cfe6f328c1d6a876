"""Reads the header of a GGUF file: metadata by key, and type, shape and place of each tensor.

Every number of the file is checked against the file's size and a limit before it is used, so that a damaged or hostile
file raises ServiceError MODEL_INVALID, whose message names file, field, value and limit. Depends on the standard
library only, as processes without torch read it too.
"""

import dataclasses
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.models.fields import MENDING, invalid_model, is_file, shown, unreadable
from sluice_server.engine.models.gguf.tensor_types import SUPPORTED, TYPES, TensorType, named

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | list[bool] | list[int] | list[float] | list[str]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20  # metadata and tensor infos; Gemma's vocabulary of 262,144 takes 7 MiB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 16 << 20
MAX_ELEMENTS = 1 << 21  # of all arrays together: 200,000 tokens with types, scores and 450,000 merges take half
MAX_DIMENSIONS = 4
MAX_NUMBERS = 1 << 40  # of a tensor
ALIGNMENTS = (8, 1 << 20)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}  # number of a metadata type → its form in `struct`


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor in its file.

    Attributes:
        shape: outputs before inputs, as elsewhere; the file has them the other way round.
        start: the first byte.
        size: the number of bytes.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def mapped(path: Path) -> mmap.mmap:
    """Maps a file into memory; writes would stay private. Raises ServiceError MODEL_INVALID."""
    if not is_file(path):
        raise invalid_model(path, "is no file, or a link to none: download it again")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no read-only memory
    except ValueError:
        raise invalid_model(path, f"is empty: {MENDING}") from None
    except OSError as error:
        raise unreadable(path, error) from error


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file. Raises ServiceError MODEL_INVALID naming file, field, value and limit."""
    with mapped(path) as data:
        return parse_header(path, data)


def parse_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """Parses the header of a file that is mapped; raises like `read_header`."""
    return _Parser(path, data).header()


class _Parser:
    """A position in a file, and what is left of the limits."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._at = 0
        self._elements = MAX_ELEMENTS

    def header(self) -> GgufHeader:
        if self._take(4, "the magic number") != MAGIC:
            raise self._wrong("does not begin with GGUF: it is no GGUF file")
        version = self._number("I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            text = "is big-endian" if swapped else f"has version {version}"
            raise self._wrong(f"{text}; supported are versions 2 and 3, little-endian")
        num_tensors = self._count("tensor_count", MAX_TENSORS)
        num_keys = self._count("kv_count", MAX_KEYS)
        metadata: dict[str, Value] = {}
        for i in range(num_keys):
            key = self._string(f"key {i}", MAX_NAME_BYTES)
            if key in metadata:
                raise self._wrong(f"has the key {shown(key)} twice: {MENDING}")
            metadata[key] = self._value(key)
        infos = [self._tensor(i) for i in range(num_tensors)]
        return GgufHeader(self._path, metadata, self._placed(infos, _alignment(self._path, metadata)))

    def _placed(self, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Returns the tensors by name, with the places that they have in the file."""
        base = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        end, last = 0, ""
        for info in sorted(infos, key=lambda info: info.start):
            what = f"tensor {shown(info.name)}"
            if info.name in placed:
                raise self._wrong(f"has the {what} twice: {MENDING}")
            if info.start % alignment:
                raise self._wrong(f"{what} has the offset {info.start}; it must be a multiple of {alignment}")
            if info.start < end:
                raise self._wrong(f"{what} at offset {info.start} overlaps tensor {shown(last)}: {MENDING}")
            end, last = info.start + info.size, info.name
            if base + end > len(self._data):
                text = f"ends at byte {base + end}, and the file has {len(self._data)}: it is cut short"
                raise self._wrong(f"{what} {text}; download it again")
            placed[info.name] = dataclasses.replace(info, start=base + info.start)
        return placed

    def _tensor(self, num: int) -> TensorInfo:
        name = self._string(f"the name of tensor {num}", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        dims = self._number("I", f"{what}: number of dimensions")
        if not 1 <= dims <= MAX_DIMENSIONS:
            raise self._wrong(f"{what} has {dims} dimensions; supported are 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q", f"{what}: dimension") for _ in range(dims))
        total = 1
        for size in shape:
            total *= size
            if not 0 < total <= MAX_NUMBERS:
                raise self._wrong(f"{what} has the shape {list(shape)}; it must have 1 to {MAX_NUMBERS} numbers")
        number = self._number("I", f"{what}: type")
        kind = TYPES.get(number)
        if kind is None:
            raise self._wrong(f"{what} has the type {named(number)}; supported are {SUPPORTED}")
        if shape[0] % kind.block:
            raise self._wrong(f"{what} has rows of {shape[0]} numbers; {kind.name} has blocks of {kind.block}")
        start = self._number("Q", f"{what}: offset")
        return TensorInfo(name, kind, shape[::-1], start, total // kind.block * kind.size)

    def _value(self, key: str) -> Value:
        what = shown(key)
        kind = self._number("I", f"{what}: type")
        if kind == ARRAY:
            return self._array(what)
        if kind == STRING:
            return self._string(what, MAX_STRING_BYTES)
        return _CONVERT.get(kind, _same)(self._number(self._form(kind, what), what))

    def _array(self, what: str) -> Value:
        kind = self._number("I", f"{what}: type of elements")
        if kind == ARRAY:
            raise self._wrong(f"{what} is an array of arrays; supported are arrays of numbers and of strings")
        count = self._count(f"{what}: length", self._elements, f"; arrays may have {MAX_ELEMENTS} elements together")
        self._elements -= count
        if kind == STRING:
            return self._strings(count, what)
        form = self._form(kind, what)
        raw = self._take(count * struct.calcsize(form), what)
        convert = _CONVERT.get(kind)
        values = struct.unpack(f"<{count}{form}", raw)
        return [convert(one) for one in values] if convert else list(values)  # type: ignore[return-value] # one type

    def _strings(self, count: int, what: str) -> list[str]:
        """Returns an array of strings. The hot loop of reading a vocabulary, hence written out."""
        data, at, end, found = self._data, self._at, self._end, []
        read = struct.Struct("<Q").unpack_from
        for i in range(count):
            size = read(data, at)[0] if at + 8 <= end else self._end
            start, at = at + 8, at + 8 + size
            if at > end:
                raise self._beyond(f"{what}, element {i}", size)
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self._wrong(f"{what}, element {i}, is not UTF-8: {MENDING}") from None
        self._at = at
        return found

    def _string(self, what: str, most: int) -> str:
        size = self._count(f"{what}: length", most)
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{what} is not UTF-8: {MENDING}") from None

    def _count(self, what: str, most: int, more: str = "") -> int:
        found: int = self._number("Q", what)
        if found > most:
            raise self._wrong(f"{what} is {found}; at most {most} are read{more}: {MENDING}")
        return found

    def _form(self, kind: int, what: str) -> str:
        form = SCALARS.get(kind)
        if form is None:
            raise self._wrong(f"{what} has the metadata type {kind}; types are 0 to 12: {MENDING}")
        return form

    def _number(self, form: str, what: str) -> int:
        (found,) = struct.unpack(f"<{form}", self._take(struct.calcsize(form), what))
        return found  # type: ignore[no-any-return] # a float for two forms

    def _take(self, size: int, what: str) -> bytes:
        start, end = self._at, self._at + size
        if end > self._end:
            raise self._beyond(what, size)
        self._at = end
        return self._data[start:end]

    def _beyond(self, what: str, size: int) -> Exception:
        limit = f"a header may have {MAX_HEADER_BYTES} bytes" if self._end < len(self._data) else "it is cut short"
        text = f"{what} has {size} bytes from byte {self._at}, beyond the {self._end} that can be read ({limit})"
        return self._wrong(f"{text}: {MENDING}")

    def _wrong(self, message: str) -> Exception:
        return invalid_model(self._path, message)


def _same(value: int) -> Scalar:
    return value


_CONVERT: Mapping[int, Callable[[int], Scalar]] = {BOOL: bool}


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    """Returns the alignment of tensors. Raises ServiceError MODEL_INVALID unless it is a power of two in bounds."""
    found = metadata.get("general.alignment", 32)
    low, high = ALIGNMENTS
    if type(found) is not int or not low <= found <= high or found & (found - 1):
        text = f"general.alignment is {shown(found)}; it must be a power of two from {low} to {high}: {MENDING}"
        raise invalid_model(path, text)
    return found
