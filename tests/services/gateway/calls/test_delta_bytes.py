"""Deltas encoded straight to bytes are those of their message."""

from hypothesis import given
from hypothesis import strategies as st
from sluice.v1 import inference_pb2

from sluice_server.services.gateway.calls import delta_bytes, responses
from sluice_server.services.gateway.calls.serialized import serialized
from sluice_server.services.gateway.generation.events import DeltaEvent, TaggedEvent
from sluice_server.services.messages.details import TokenLogprobs, TokenRecord
from sluice_server.services.messages.messages import Envelope, Text
from sluice_server.services.messages.work import ToolCall, ToolCallPart

ENVELOPE = Envelope("0" * 32, "g0")
RECORDS = st.builds(
    TokenRecord,
    st.integers(0, (1 << 20)),
    st.binary(max_size=8),
    st.none() | st.just(TokenLogprobs(-0.5, 2, (), ())),
)
SOMETIMES = st.integers(0, 9).map(lambda number: number == 0)


@st.composite
def texts_of(draw: st.DrawFn) -> tuple[Text, ...]:
    index = draw(st.sampled_from([0, 0, 1, 300]))
    return tuple(
        Text(
            ENVELOPE,
            0,
            tuple(draw(st.lists(RECORDS, max_size=3))),
            draw(st.text(max_size=200)),
            index,
            reasoning="why" if draw(SOMETIMES) else "",
            tool_calls=(ToolCall("a", "b", "{}"),) if draw(SOMETIMES) else (),
            tool_call_parts=(ToolCallPart(0, "a", "b", "{"),) if draw(SOMETIMES) else (),
            num_steps=draw(st.integers(1, 5000)),
            drafts=((3, 2),) if draw(SOMETIMES) else (),
        )
        for _ in range(draw(st.integers(1, 3)))
    )


@given(texts_of(), st.integers(1, 1 << 40), st.text("0123456789abcdef.", min_size=1, max_size=300), st.booleans())
def test_the_bytes_of_a_delta_are_those_of_its_message(
    texts: tuple[Text, ...], seq: int, name: str, has_records: bool
) -> None:
    event = DeltaEvent(name, seq, texts, has_records)
    for kind in (inference_pb2.StreamGenerateResponse, inference_pb2.ResumeGenerateResponse):
        made = responses.fill(kind(), event)
        assert serialized(responses.of_stream(kind, event)) == made.SerializeToString(deterministic=True)
    tagged = TaggedEvent(seq, event)
    frame = responses.converse_response(tagged).SerializeToString(deterministic=True)
    assert serialized(responses.of_converse(tagged)) == frame


def test_a_delta_of_text_and_ids_needs_no_message() -> None:
    def encoded(*texts: Text, has_records: bool) -> bytes | None:
        return delta_bytes.as_field(b"\x12", DeltaEvent("0.g0", 1, texts, has_records))

    text = Text(ENVELOPE, 0, (TokenRecord(5, b"a"),), "a")
    half = Text(ENVELOPE, 0, (TokenRecord(5, b"\xc3"),), "")
    scored = Text(ENVELOPE, 0, (TokenRecord(5, b"a", TokenLogprobs(-0.5, 2, (), ())),), "a")
    assert encoded(text, text, has_records=False) is not None
    assert encoded(text, half, has_records=True) is not None and encoded(half, has_records=True) is not None
    assert encoded(text, scored, has_records=True) is None and encoded(scored, has_records=False) is not None
