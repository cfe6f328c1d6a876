"""The main rules of `make proto-breaking`, checked without buf and without a network."""

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from tools.generate_stubs import PROTOS

Fact = tuple[str, ...]


def released() -> list[FileDescriptorProto]:
    image = FileDescriptorSet.FromString((PROTOS / "released.binpb").read_bytes())
    return [file for file in image.file if file.package == "sluice.v1"]


def current() -> list[FileDescriptorProto]:
    found = []
    for module in (control_pb2, inference_pb2, types_pb2):
        found.append(FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(found[-1])
    return found


def facts(files: list[FileDescriptorProto]) -> set[Fact]:
    """Everything that an older client relies on."""
    return {fact for file in files for fact in _of_file(file)}


def _of_file(file: FileDescriptorProto) -> Iterator[Fact]:
    for message in file.message_type:
        yield from _of_message(message)
    for enum in file.enum_type:
        yield from (("value", enum.name, value.name, str(value.number)) for value in enum.value)
    for service in file.service:
        for method in service.method:
            streams = f"{method.client_streaming} {method.server_streaming}"
            yield "method", service.name, method.name, method.input_type, method.output_type, streams


def _of_message(message: DescriptorProto) -> Iterator[Fact]:
    for field in message.field:
        kind = f"{field.type} {field.label} {field.type_name} {field.proto3_optional} {field.HasField('oneof_index')}"
        yield "field", message.name, field.name, str(field.number), kind


def test_nothing_that_was_released_is_gone_or_changed() -> None:
    assert facts(released()) - facts(current()) == set()


def test_a_changed_field_would_be_seen() -> None:
    files = released()
    before = facts(files)
    files[0].message_type[0].field[0].number = 999
    assert len(before - facts(files)) == 1
