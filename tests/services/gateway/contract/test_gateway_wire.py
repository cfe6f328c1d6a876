"""Oversized requests are cut before they are parsed: within limits nothing changes, beyond them the field is found."""

from collections.abc import Callable

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract import translate, wire
from tests.services.gateway.fake_ring import generation, running, settings, stream_request
from tests.services.gateway.talker import Talker

SETTINGS = settings()
LEVEL = wire.level_of(inference_pb2.StreamGenerateRequest.DESCRIPTOR, wire.bounds(SETTINGS))
Fill = Callable[[types_pb2.GenerationSpec], object]
MILLION = 1_000_000


def big_chat(spec: types_pb2.GenerationSpec) -> types_pb2.ChatMessage:
    return spec.chat.messages.add(role=types_pb2.ROLE_ASSISTANT)


OVERFULL: dict[str, Fill] = {
    "logit_bias": lambda spec: spec.sampling.logit_bias.update(dict.fromkeys(range(MILLION), 1.0)),
    "allowed_token_ids": lambda spec: spec.sampling.allowed_token_ids.extend(range(MILLION)),
    "bad_token_ids": lambda spec: spec.sampling.bad_token_ids.extend([1] * MILLION),
    "bad_words": lambda spec: spec.sampling.bad_words.extend(["word"] * MILLION),
    "stop.strings": lambda spec: spec.stop.strings.extend(["stop"] * MILLION),
    "stop_token_ids": lambda spec: spec.stop.token_ids.extend([1] * MILLION),
    "logprob_token_ids": lambda spec: spec.output.logprob_token_ids.extend([1] * MILLION),
    "constraint.choice.texts": lambda spec: spec.constraint.choice.texts.extend(["a"] * MILLION),
    "chat.messages": lambda spec: [spec.chat.messages.add() for _ in range(MILLION // 10)],
    "chat.tools": lambda spec: [big_chat(spec), *(spec.chat.tools.add() for _ in range(MILLION // 10))],
    "chat.messages[0].parts": lambda spec: spec.chat.messages.add(
        role=types_pb2.ROLE_USER, parts=[types_pb2.ContentPart(text="a")] * (MILLION // 10)
    ),
    "chat.messages[0].tool_calls": lambda spec: big_chat(spec).tool_calls.extend(
        [types_pb2.ToolCall(name="a", arguments="{}")] * (MILLION // 10)
    ),
}


def request(fill: Fill) -> bytes:
    asked = inference_pb2.StreamGenerateRequest()
    fill(asked.spec)
    if not asked.spec.HasField("chat"):
        asked.spec.text = "after the lists, or before them"
    return asked.SerializeToString()


@pytest.mark.parametrize("field", OVERFULL)
def test_a_list_that_is_too_long_is_cut_and_still_refused(field: str) -> None:
    data = request(OVERFULL[field])
    assert len(data) > wire.LARGE
    short = wire.cut_short(data, LEVEL)
    assert len(short) < wire.LARGE
    with pytest.raises(ServiceError, match="has more than the") as caught:
        translate.generation(inference_pb2.StreamGenerateRequest.FromString(short).spec, 0, SETTINGS)
    assert caught.value.field == field


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21])


def field(number: int, value: bytes) -> bytes:
    """An encoded field that holds bytes."""
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def test_numbers_need_not_be_packed() -> None:
    ids = b"\x80\x01\x07" * MILLION  # field 16, one at a time
    data = field(1, field(4, b"text") + field(7, ids) + field(2, b"revision"))
    short = inference_pb2.StreamGenerateRequest.FromString(wire.cut_short(data, LEVEL)).spec
    assert len(short.sampling.allowed_token_ids) == SETTINGS.limits.max_allowed_token_ids + 1
    assert (short.text, short.revision) == ("text", "revision")  # what follows the message is still there


def test_a_message_that_comes_in_many_pieces_is_no_way_round() -> None:
    piece = field(7, b"\x5a\x0b\x08\x07\x11" + b"\0" * 8)  # one bias
    with pytest.raises(wire.TooManyFieldsError):
        wire.cut_short(field(1, piece * 100_000), LEVEL)


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_a_million_fields_are_no_request(method: str) -> None:
    data = field(1, b"\x88\x01\x01" * MILLION)  # field 17, again and again
    async with running() as rig:
        path = f"/sluice.v1.InferenceService/{method}"
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = rig.channel.unary_stream(path)
        with pytest.raises(grpc.aio.AioRpcError, match=r"request: is not a valid .* 32768 fields") as caught:
            await call(data).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_come_through(data: bytes, depth: int) -> None:
    """Bytes within the limits, or malformed ones, are left to the parser: nothing is changed or raised."""
    for number in (7, 1, 1)[:depth]:
        data = field(number, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", -1)
        assert wire.cut_short(data, LEVEL) is data


@given(st.integers(0, 1030), st.integers(0, 4200), st.integers(0, 35), st.text(max_size=20))
def test_what_is_left_is_what_was_before_it(biases: int, ids: int, strings: int, text: str) -> None:
    asked = inference_pb2.StreamGenerateRequest(spec=types_pb2.GenerationSpec(text=text, revision=text))
    spec = asked.spec
    spec.sampling.allowed_token_ids.extend(range(1 << 30, (1 << 30) + ids))
    spec.sampling.logit_bias.update(dict.fromkeys(range(biases), 1.0))
    spec.stop.strings.extend([text] * strings)
    data = asked.SerializeToString(deterministic=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", -1)
        short = wire.cut_short(data, LEVEL)
    found = inference_pb2.StreamGenerateRequest.FromString(short).spec
    limits = SETTINGS.limits
    assert len(found.sampling.logit_bias) == min(biases, limits.max_logit_biases + 1)
    assert len(found.stop.strings) == min(strings, limits.max_stop_strings + 1)
    assert (found.text, found.revision) == (text, text)
    if biases <= limits.max_logit_biases and strings <= limits.max_stop_strings:
        assert short is data and found == spec


async def test_a_million_biases_end_their_own_generation_only() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(sampling=too_many()))
        with pytest.raises(grpc.aio.AioRpcError, match="logit_bias: has more than the 1024 entries") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        talk = Talker(rig)
        submit = await talk.open(1)
        assert await talk.kinds(1) == [(1, "accepted")]
        await talk.send(2, open=inference_pb2.Open(spec=stream_request(sampling=too_many()).spec))
        tag, failed, _ = await talk.failure()
        assert tag == 2 and "logit_bias" in failed.message
        rig.ring.play(*generation(submit, ["goes", " on"]))
        assert (await talk.rest())[-1].WhichOneof("frame") == "finished"
        assert [one.envelope.request_id for one in rig.ring.submits] == [submit.envelope.request_id]


def too_many() -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MILLION), 1.0))
