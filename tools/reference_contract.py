"""Renders the gRPC contract as a Markdown page: services, messages and enums of `protos/sluice/v1` with their comments.

Descriptors in, text out; only `descriptors` runs protoc. Writes no files.
"""

import importlib.resources
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
FILES = ("sluice/v1/inference.proto", "sluice/v1/control.proto", "sluice/v1/types.proto")
PACKAGE = ".sluice.v1."
# Field numbers in descriptor.proto; the path of a comment consists of them.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED, ENUMS_OF_MESSAGE, ONEOFS = 2, 3, 4, 8
METHODS = VALUES = 2

Field = descriptor_pb2.FieldDescriptorProto
Message = descriptor_pb2.DescriptorProto
Enum = descriptor_pb2.EnumDescriptorProto
Path_ = tuple[int, ...]
SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in Field.Type.items() if not name.endswith("MESSAGE")
}


def descriptors() -> list[descriptor_pb2.FileDescriptorProto]:
    """Returns the contract's files with their comments, in the order of `FILES`. Raises RuntimeError if protoc
    fails."""
    well_known = str(importlib.resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "set.binpb"
        options = [f"-I{PROTOS}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={made}"]
        if status := protoc.main(["protoc", *options, *FILES]):
            raise RuntimeError(f"protoc ended with {status}")
        found = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())
    by_name = {one.name: one for one in found.file}
    return [by_name[name] for name in FILES]


def page(files: list[descriptor_pb2.FileDescriptorProto]) -> str:
    """Returns the whole page."""
    lines = [
        "# The contract",
        "",
        "<!-- Generated from protos/ by `make reference`. Do not edit. -->",
        "",
        "`sluice.v1` is the public gRPC contract. Each field says its range and what its absence means. Every",
        "parameter is `optional`; the server returns the values it uses. [Adding an",
        "endpoint](../adding-an-endpoint.md) says how the contract grows.",
        "",
    ]
    for file in files:
        lines += _ContractFile(file).lines()
    return "\n".join(lines).rstrip() + "\n"


class _ContractFile:
    """Renders one file of the contract."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): [line.strip() for line in place.leading_comments.strip().splitlines()]
            for place in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines of the file's part of the page."""
        yield from (f"## `{self._file.name}`", "")
        for i, service in enumerate(self._file.service):
            yield from (f"### {service.name}", "", self._comment((SERVICES, i)), "")
            for k, method in enumerate(service.method):
                asked = _streamed(method.client_streaming, method.input_type)
                answer = _streamed(method.server_streaming, method.output_type)
                yield from (f"#### {method.name}", "", f"{asked} → {answer}", "")
                yield from (self._comment((SERVICES, i, METHODS, k)), "")
        for i, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGES, i), "")
        for i, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUMS, i), "")

    def _message(self, message: Message, path: Path_, outer: str) -> Iterator[str]:
        name = outer + message.name
        yield from (f"### {name}", "", self._comment(path), "")
        if message.field:
            yield from ("| field | type | no. | |", "| --- | --- | --- | --- |")
        for k, field in enumerate(message.field):
            yield f"| `{field.name}` | {_kind(field, message)} | {field.number} | {self._cell((*path, FIELDS, k))} |"
        yield ""
        entries = {one.name for one in message.nested_type if one.options.map_entry}
        for k, nested in enumerate(message.nested_type):
            if nested.name not in entries:
                yield from self._message(nested, (*path, NESTED, k), f"{name}.")
        for k, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, ENUMS_OF_MESSAGE, k), f"{name}.")

    def _enum(self, enum: Enum, path: Path_, outer: str) -> Iterator[str]:
        yield from (f"### {outer}{enum.name}", "", self._comment(path), "")
        yield from ("| value | no. | |", "| --- | --- | --- |")
        for k, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {self._cell((*path, VALUES, k))} |"
        yield ""

    def _comment(self, path: Path_) -> str:
        """Returns the comment, with an empty line before each list, as Markdown requires."""
        lines = self._comments.get(path, [])
        apart = [
            f"\n{line}" if line.startswith("- ") and not before.startswith("- ") else line
            for before, line in zip(["", *lines], lines, strict=False)
        ]
        return re.sub(r"([<>])", r"\\\1", "\n".join(apart))

    def _cell(self, path: Path_) -> str:
        return " ".join(self._comment(path).split()).replace("|", "\\|")


def _streamed(is_stream: bool, kind: str) -> str:
    return f"{'stream of ' if is_stream else ''}{_link(kind)}"


def _link(kind: str) -> str:
    if not kind.startswith(PACKAGE):
        return f"`{kind.removeprefix('.')}`"
    name = kind.removeprefix(PACKAGE)
    return f"[{name}](#{name.lower().replace('.', '')})"


def _kind(field: Field, message: Message) -> str:
    name = _link(field.type_name) if field.type_name else f"`{SCALARS[field.type]}`"
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            return f"map of {_kind(nested.field[0], nested)} to {_kind(nested.field[1], nested)}"
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name
