"""What becomes of a field of a request's body: the kinds of rows of `field_table`, the spec that the rows make, and the
fields' names in errors.

A row's `kind` is the field's type in JSON; null always means absent.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import bad_request, unsupported
from sluice_server.services.edge.names import FieldNames

CHAT = "chat"
COMPLETION = "completions"
CHATS, COMPLETIONS = frozenset([CHAT]), frozenset([COMPLETION])
BOTH = CHATS | COMPLETIONS
OPENAI, VLLM, SGLANG, LLAMA, SLUICE = "OpenAI", "vLLM", "SGLang", "llama.cpp", "sluice"

_BOUNDS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """A field; `origin` is the product that has it, `routes` are those that take it."""

    name: str
    kind: object
    origin: str
    routes: frozenset[str] = BOTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent(_Row):
    """A field that goes to `path` of a GenerationSpec, converted by `by`; what becomes None is absent there.

    `note` says what the conversion changes; `also` are further paths that follow from the field.
    """

    path: str
    by: Callable[[Any], object] = lambda value: value
    note: str = ""
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label(_Row):
    """A field that no answer depends on: it is taken, and has no effect. `note` says what it is."""

    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unbuilt(_Row):
    """A field that is not built. `neutral` are the values that mean the same as its absence; others are refused, and
    `instead` says what to do."""

    neutral: tuple[object, ...] = ()
    instead: str = "leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(_Row):
    """A field of a struct in `wire`, which code reads; `note` says what it does.

    `names` are those of its parts in errors, by path of a GenerationSpec; see `FieldNames`.
    """

    note: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


Row: TypeAlias = Sent | Label | Unbuilt | Own
_Nested: TypeAlias = dict[str, Any]


def spec_of(rows: Mapping[str, Row], values: Mapping[str, Any]) -> types_pb2.GenerationSpec:
    """Returns the spec that the rows make of a body's values; both by name. None: a value is absent. Raises
    EdgeError."""
    nested: _Nested = {}
    senders: dict[str, tuple[str, object]] = {}
    for name, given in values.items():
        if given is None or isinstance(row := rows[name], Label | Own):
            continue
        if isinstance(row, Unbuilt):
            if given not in row.neutral:
                raise unsupported(row.name, f"is not supported by this server: {row.instead}")
            continue
        value = row.by(given)
        if value is None:
            continue
        _check_bounds(row, value)
        first, before = senders.setdefault(row.path, (row.name, value))
        if before != value:
            raise bad_request(row.name, f"says something else than {first}: send one of them")
        _put(nested, row.path, value)
    return types_pb2.GenerationSpec(**nested)


def unless(off: object) -> Callable[[Any], object]:
    """Returns a converter for which `off` means absent."""
    return lambda value: None if value == off else value


def names_of(rows: Iterable[Row], values: Callable[[], Mapping[str, Any]]) -> FieldNames:
    """Returns the names of the fields of a body in errors; of several fields for one path it is the one that is
    given. `values` returns those of the body."""
    return FieldNames(lambda: _names(rows, values()))


def _names(rows: Iterable[Row], values: Mapping[str, Any]) -> Mapping[str, str]:
    given: dict[str, str] = {}
    absent: dict[str, str] = {}
    for row in rows:
        value = values.get(row.name)
        for path, name in _named(row, value):
            if value is not None:
                given[path] = name
            else:
                absent.setdefault(path, name)
    return {**absent, **given}


def _named(row: Row, value: object) -> Iterable[tuple[str, str]]:
    match row:
        case Own():
            return row.names.items()
        case Sent():
            name = f"{row.name}[]" if isinstance(value, list) else row.name
            return [(path, name) for path in (row.path, *row.also)]
        case _:
            return ()


def field_at(path: str) -> FieldDescriptor:
    """Returns the field of GenerationSpec at a path; KeyError if there is none."""
    message: Descriptor = types_pb2.GenerationSpec.DESCRIPTOR
    *parents, last = path.split(".")
    for parent in parents:
        found = message.fields_by_name[parent].message_type
        assert found is not None, path
        message = found
    return message.fields_by_name[last]


def _check_bounds(row: Sent, value: Any) -> None:  # noqa: ANN401 # of the field's type in JSON
    """Refuses a number that its field in the contract cannot hold: an integer, those of a list, or a map's keys."""
    bounds = _bounds_at(row.path)
    if bounds is None:
        return
    low, high = bounds
    for one in value if isinstance(value, list | dict) else [value]:
        if not low <= one <= high:
            raise bad_request(row.name, f"{one} is not in [{low}, {high}]")


@functools.cache
def _bounds_at(path: str) -> tuple[int, int] | None:
    """Returns the least and the greatest number of a field of the contract; None for one that holds no integers."""
    field = field_at(path)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        field = field.message_type.fields_by_name["key"]
    return _BOUNDS.get(field.cpp_type)


def _put(nested: _Nested, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        nested = nested.setdefault(parent, {})
    nested[last] = value
