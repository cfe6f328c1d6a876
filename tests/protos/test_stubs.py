from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from tools import generate_stubs

FILES: tuple[FileDescriptor, ...] = (types_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR)
STALE = "clients/python/src/sluice/v1/types_pb2.py"


def test_the_stubs_are_those_of_the_contract() -> None:
    assert generate_stubs.different(generate_stubs.generate(), generate_stubs.ROOT) == []


def test_a_stale_stub_is_seen() -> None:
    fresh = generate_stubs.generate()
    changed = fresh | {STALE: b""}
    assert generate_stubs.different(changed, generate_stubs.ROOT) == [STALE]


def test_every_parameter_is_optional() -> None:
    messages: list[Descriptor] = [
        types_pb2.SamplingParams.DESCRIPTOR,
        types_pb2.OutputOptions.DESCRIPTOR,
        types_pb2.SchedulingOptions.DESCRIPTOR,
        types_pb2.SpeculationOptions.DESCRIPTOR,
        types_pb2.CacheOptions.DESCRIPTOR,
    ]
    scalars = [field for one in messages for field in one.fields if not field.is_repeated]
    assert [field.full_name for field in scalars if not field.has_presence] == []


def test_unbounded_fields_state_their_limit() -> None:
    source = {one.name: (generate_stubs.PROTOS / one.name).read_text() for one in FILES}
    silent = []
    for file in FILES:
        for message in file.message_types_by_name.values():
            body = source[file.name].split(f"message {message.name} {{", 1)[1].split("\n}", 1)[0]
            silent += [field.full_name for field in message.fields if _grows(field) and not _limited(field, body)]
    assert silent == []


def _grows(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated) or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _limited(field: FieldDescriptor, body: str) -> bool:
    comment = body.split(f" {field.name} = ", 1)[0].rsplit(";", 1)[-1]
    return any(word in comment for word in ("At most", " at most", " to ", "or none"))
