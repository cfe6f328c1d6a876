"""Several messages joined into one: nothing is lost, ends keep their places."""

from sluice_server.engine.request import FinishReason
from sluice_server.services.detokenizer.joined import joined, text_of
from sluice_server.services.detokenizer.output import OutputProgress
from sluice_server.services.messages.details import Admitted, Timings, TokenRecord
from sluice_server.services.messages.messages import Envelope, Text, Tokens
from sluice_server.services.messages.work import Stops, ToolCall

ENVELOPE = Envelope("r", "g")


def test_one_is_itself() -> None:
    text = Text(ENVELOPE, 3, (), "a")
    assert joined([text]) is text


def test_the_first_tells_the_beginning_and_the_last_the_end() -> None:
    records = [TokenRecord(id=at, piece=b"x") for at in range(4)]
    admitted, timings, call = Admitted(3, 0, 8, Stops()), Timings(decode_s=2.0), ToolCall("f", "{}", "i")
    first = Text(ENVELOPE, 5, tuple(records[:2]), "ab", output_index=1, admitted=admitted, drafts=((3, 1),))
    middle = Text(ENVELOPE, 7, (records[2],), "", output_index=1, reasoning="hm", num_reasoning=1, num_steps=4)
    last = Text(
        ENVELOPE,
        8,
        (records[3],),
        "c",
        output_index=1,
        finish=FinishReason.STOP_STRING,
        stop_match="d",
        timings=timings,
        reasoning=" so",
        num_reasoning=1,
        tool_calls=(call,),
        drafts=((2, 0),),
    )
    assert joined([first, middle, last]) == Text(
        ENVELOPE,
        5,
        tuple(records),
        "abc",
        output_index=1,
        admitted=admitted,
        finish=FinishReason.STOP_STRING,
        stop_match="d",
        timings=timings,
        reasoning="hm so",
        num_reasoning=2,
        tool_calls=(call,),
        num_steps=6,
        drafts=((3, 1), (2, 0)),
    )


def test_text_of_several_messages_of_tokens_is_that_of_each_joined() -> None:
    """Decoded together or one by one: the client must not see which."""
    records = [TokenRecord(id=at, piece=b"x") for at in range(4)]
    admitted, timings = Admitted(3, 0, 8, Stops()), Timings(decode_s=2.0)
    came = [
        Tokens(ENVELOPE, 5, (0, 1), 1, admitted=admitted, num_drafted=3, num_accepted=1),
        Tokens(ENVELOPE, 7, (2,), 1),
        Tokens(ENVELOPE, 8, (3,), 1, finish=FinishReason.LENGTH, timings=timings, num_drafted=2),
    ]
    ends = [None, None, FinishReason.LENGTH]
    parts = [tuple(records[:2]), (records[2],), (records[3],)]
    each = [
        text_of([one], OutputProgress(text, len(one.ids), end), part, 0.5)
        for one, text, end, part in zip(came, "abc", ends, parts, strict=True)
    ]
    assert text_of(came, OutputProgress("abc", 4, FinishReason.LENGTH), tuple(records), 0.5) == joined(each)
