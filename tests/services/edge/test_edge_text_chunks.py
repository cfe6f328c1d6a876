"""Chunks of text alone, made from the bytes around their text, are those that the general way makes."""

import itertools
import random

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.edge.answers import CHAT, COMPLETION, Dialect
from sluice_server.services.edge.report import AnswerReport
from sluice_server.services.edge.stream import Chunks

Event = inference_pb2.StreamGenerateResponse
TEXTS = ("a", " word", '"', "\\", "\n", "\0text", "\x7f\u2028", "é€😀", '\0text"', "</script>", "{}", "")
REPORTS = {
    "plain": AnswerReport(num_outputs=2),
    "usage at the end": AnswerReport(include_usage=True, num_outputs=2),
    "usage in each chunk": AnswerReport(include_usage=True, continuous_usage=True, num_outputs=2),
    "ids": AnswerReport(token_ids=True, num_outputs=2),
    "log probabilities": AnswerReport(scored=True, num_outputs=2),
    "the prompt only": AnswerReport(echoed=("p",), prompt_only=True, num_outputs=2),
    "two prompts": AnswerReport(num_prompts=2, num_outputs=2),
}


class Plain(Chunks):
    """Chunks that are all made the general way."""

    __slots__ = ()

    def _text_alone(self, source: int, delta: types_pb2.Delta) -> bytes:
        return b""


def events_of(report: AnswerReport, rng: random.Random) -> list[tuple[int, Event]]:
    events = []
    for source in range(report.num_prompts):
        events.append((source, Event(accepted=types_pb2.Accepted(generation_id=f"g{source}", model='m"\0text"'))))
    for _ in range(40):
        text = "".join(rng.choices(TEXTS, k=rng.randrange(4)))
        delta = types_pb2.Delta(output_index=rng.randrange(report.num_outputs), text=text, consumed=1)
        delta.tokens.add(id=rng.randrange(9), piece=text.encode(), logprob=-1.0)
        if rng.random() < 0.2:
            delta.reasoning = "why"
        if rng.random() < 0.2:
            delta.tool_calls.add(id="c", name="f", arguments="{}")
            delta.tool_call_parts.add(index=0, id="c", name="f", arguments="{}")
        events.append((rng.randrange(report.num_prompts), Event(delta=delta)))
    for source in range(report.num_prompts):
        for index in range(report.num_outputs):
            ended = types_pb2.OutputFinished(output_index=index, finish_reason=types_pb2.FINISH_REASON_EOS)
            events.append((source, Event(output_finished=ended)))
        events.append((source, Event(finished=types_pb2.Finished(usage=types_pb2.Usage(completion_tokens=4)))))
    return events


def made(chunks: Chunks, events: list[tuple[int, Event]], most: int) -> list[bytes]:
    """The pieces of events of which up to that many of one source come together."""
    groups = [
        (source, [event for _, event in group]) for source, group in itertools.groupby(events, lambda one: one[0])
    ]
    pieces = []
    for source, group in groups:
        pieces += [chunks.of(source, group[at : at + most]) for at in range(0, len(group), most)]
    return pieces


@pytest.mark.parametrize("dialect", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_chunks_are_the_same(dialect: Dialect, report: AnswerReport) -> None:
    for seed in range(20):
        events = events_of(report, random.Random(seed))
        alone = made(Chunks(dialect, 1, report), events, 1)
        assert alone == made(Plain(dialect, 1, report), events, 1)
        assert b"".join(alone) == b"".join(made(Chunks(dialect, 1, report), events, 3))
