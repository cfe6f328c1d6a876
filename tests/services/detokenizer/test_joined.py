"""Several messages joined into one: nothing is lost, ends keep their places."""

from sluice_server.engine.request import FinishReason
from sluice_server.services.detokenizer.joined import joined
from sluice_server.services.messages.details import Admitted, Timings, TokenRecord
from sluice_server.services.messages.messages import Envelope, Text
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
