"""The options that SDKs spell by hand, held to the contract and to the engine's table of sampling parameters."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import sluice
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from sluice.spec import build
from sluice.v1 import types_pb2

from sluice_server.engine.parameter_kinds import Biases, Parameter
from sluice_server.engine.parameters import PARAMETERS

CPP = Path(__file__).resolve().parents[2] / "clients/cpp"
OPTIONS = get_type_hints(sluice.GenerateOptions)
WITHOUT_AN_OPTION = {
    "logit_bias",
    "beam",
    "allowed_token_ids",
    "bad_token_ids",
    "logits_processors",
    "strategy",
}  # set on a spec of one's own
KINDS = {FieldDescriptor.CPPTYPE_DOUBLE: float, FieldDescriptor.CPPTYPE_STRING: str, FieldDescriptor.CPPTYPE_BOOL: bool}
CPP_TYPES = {
    FieldDescriptor.CPPTYPE_DOUBLE: "double",
    FieldDescriptor.CPPTYPE_UINT32: "std::uint32_t",
    FieldDescriptor.CPPTYPE_INT32: "std::int32_t",
    FieldDescriptor.CPPTYPE_UINT64: "std::uint64_t",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_STRING: "const std::string&",
}


def fields() -> Iterator[tuple[str, FieldDescriptor]]:
    """The fields of a spec and of its parts, by path."""
    for field in types_pb2.GenerationSpec.DESCRIPTOR.fields:
        yield field.name, field
        if field.message_type is not None and not field.is_repeated:
            yield from ((f"{field.name}.{one.name}", one) for one in field.message_type.fields)


FIELDS = dict(fields())


def value_at(spec: Message, path: str) -> object:
    """The value of a set field; None for an unset one."""
    value: object = spec
    for name in path.split("."):
        assert isinstance(value, Message)
        value = next((found for field, found in value.ListFields() if field.name == name), None)
        if value is None:
            return None
    return value


def test_every_sampling_parameter_of_the_contract_has_an_option() -> None:
    names = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys()
    assert names - OPTIONS.keys() == WITHOUT_AN_OPTION


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() & types_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys()))
def test_an_options_type_is_its_fields(name: str) -> None:
    field = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    assert field.is_repeated or OPTIONS[name] is KINDS.get(field.cpp_type, int)


@pytest.mark.parametrize("row", [row for row in PARAMETERS if row.name in OPTIONS], ids=lambda row: row.name)
def test_an_option_goes_where_the_table_has_it(row: Parameter) -> None:
    assert not isinstance(row, Biases)
    value: object = [1] if FIELDS[row.field].is_repeated else 1
    found = value_at(build("p", {row.name: value}), row.field)  # type: ignore[misc] # of its own type
    assert found == value


SETTERS = re.compile(
    r"^Request& Request::(\w+)\((\S.*?) \w+\) \{\n  spec_\.(?:mutable_(\w+)\(\)->)?(set|add)_(\w+)\(\w+\);", re.M
)


def test_a_setter_of_cpp_sets_what_it_is_called_after() -> None:
    header = (CPP / "include/sluice/request.h").read_text()
    found = SETTERS.findall((CPP / "src/request.cc").read_text())
    assert {name for name, *_ in found} >= {"model", "max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop"}
    rows = {row.name: row.field for row in PARAMETERS}
    for name, kind, group, verb, field in found:
        path = f"{group}.{field}" if group else field
        assert FIELDS[path].is_repeated == (verb == "add"), name
        assert kind == CPP_TYPES[FIELDS[path].cpp_type], name
        assert path == rows.get(name, path) and (field == name or name == "stop"), name
        assert re.search(rf"  Request& {name}\({re.escape(kind)} \w+", header), name
