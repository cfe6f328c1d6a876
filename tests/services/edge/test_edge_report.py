"""What answers tell besides text: echo, ids and log probabilities of the prompt, usage; whole and streamed."""

from collections.abc import Iterator
from typing import Any

import msgspec
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.edge.answers import CHAT, COMPLETION, Dialect, whole
from sluice_server.services.edge.report import AnswerReport, Json
from sluice_server.services.edge.stream import Chunks

Event = inference_pb2.StreamGenerateResponse


def token(number: int, piece: bytes, logprob: float | None = None, **candidates: float) -> types_pb2.Token:
    top = [
        types_pb2.Candidate(id=at, piece=text.encode(), logprob=value, rank=at + 1)
        for at, (text, value) in enumerate(candidates.items())
    ]
    return types_pb2.Token(id=number, piece=piece, logprob=logprob, rank=3, candidates=top)


PROMPT = types_pb2.PromptInfo(
    prompt_tokens=3, cached_tokens=1, tokens=[token(1, b"<s>"), token(5, b"a", -1.0, b=-0.5), token(6, b"b", -2.0)]
)
OUTPUT = [token(7, b"c", -3.0, c=-3.0, d=-4.0)]
LENGTH = types_pb2.FINISH_REASON_LENGTH
USAGE = types_pb2.Usage(prompt_tokens=3, completion_tokens=1)


def answer(dialect: Dialect, report: AnswerReport, num: int = 1) -> Json:
    made = inference_pb2.GenerateResponse(
        prompt_info=PROMPT,
        outputs=[types_pb2.Output(text="c", tokens=OUTPUT, finish_reason=LENGTH)],
        usage=USAGE,
    )
    return whole(dialect, [made] * num, 1, report)


def pieces(dialect: Dialect, report: AnswerReport, sources: tuple[int, ...] = (0,)) -> list[bytes]:
    def events() -> Iterator[tuple[int, Event]]:
        for source in sources:
            yield source, Event(accepted=types_pb2.Accepted(generation_id=f"g{source}"))
            yield source, Event(prompt_info=PROMPT)
        for source in sources:
            yield source, Event(delta=types_pb2.Delta(text="c", tokens=OUTPUT, consumed=1))
            yield source, Event(output_finished=types_pb2.OutputFinished(finish_reason=LENGTH))
            yield source, Event(finished=types_pb2.Finished(usage=USAGE))

    made = Chunks(dialect, 1, report)
    return [piece for source, event in events() if (piece := made.of(source, [event]))]


def chunks(dialect: Dialect, report: AnswerReport, sources: tuple[int, ...] = (0,)) -> list[Json]:
    events = b"".join(pieces(dialect, report, sources)).split(b"\n\n")
    assert events.pop() == b"" and all(event.startswith(b"data: ") for event in events)
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


def test_the_chunks_of_an_event_are_one_write() -> None:
    first, *_ = found = pieces(CHAT, AnswerReport(include_usage=True))
    assert first.count(b"data: ") == 2 and len(found) == 3  # role and text; how the output ended; usage


def only(found: Json) -> dict[str, Any]:
    (choice,) = found["choices"]
    assert isinstance(choice, dict)
    return choice


def test_a_prompt_precedes_its_answer() -> None:
    choice = only(answer(COMPLETION, AnswerReport(scored=True, echoed=("ab",))))
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0, -3.0],
        "top_logprobs": [None, {"b": -0.5}, {}, {"d": -4.0, "c": -3.0}],
        "text_offset": [0, 0, 1, 2],
    }
    assert only(answer(COMPLETION, AnswerReport(echoed=(None,))))["text"] == "<s>abc"
    many = answer(COMPLETION, AnswerReport(echoed=("ab", "x"), num_prompts=2), 2)
    assert [(one["index"], one["text"]) for one in many["choices"]] == [(0, "abc"), (1, "xc")]


def test_a_prompt_alone() -> None:
    found = answer(COMPLETION, AnswerReport(scored=True, echoed=("ab",), prompt_only=True))
    assert (only(found)["text"], only(found)["logprobs"]["tokens"]) == ("ab", ["<s>", "a", "b"])
    assert (found["usage"]["completion_tokens"], found["usage"]["total_tokens"]) == (0, 3)


def test_ids_and_log_probabilities_of_the_prompt() -> None:
    report = AnswerReport(token_ids=True, prompt_logprobs=True)
    logprobs = [
        None,
        {
            "5": {"logprob": -1.0, "rank": 3, "decoded_token": "a"},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
        {"6": {"logprob": -2.0, "rank": 3, "decoded_token": "b"}},
    ]
    choice = only(answer(COMPLETION, report))
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["prompt_logprobs"]) == ([7], [1, 5, 6], logprobs)
    found = answer(CHAT, report)
    assert (only(found)["token_ids"], found["prompt_token_ids"], found["prompt_logprobs"]) == ([7], [1, 5, 6], logprobs)
    assert "token_ids" not in only(answer(CHAT, AnswerReport())) and "prompt_token_ids" not in answer(
        CHAT, AnswerReport()
    )


def test_tokens_by_their_ids() -> None:
    report = AnswerReport(scored=True, tokens_as_ids=True)
    assert only(answer(COMPLETION, report))["logprobs"]["tokens"] == ["token_id:7"]
    assert only(answer(CHAT, report))["logprobs"]["content"][0]["token"] == "token_id:7"


def test_of_candidates_with_one_name_the_best_is_told() -> None:
    halves = [types_pb2.Candidate(piece=b"\xc3", logprob=-1.0), types_pb2.Candidate(piece=b"\xc4", logprob=-2.0)]
    found = COMPLETION.logprobs([types_pb2.Token(piece=b"\xc3", logprob=-1.0, candidates=halves)], 0, AnswerReport())
    assert found["top_logprobs"] == [{"\ufffd": -1.0}]


def test_a_prompt_precedes_its_stream() -> None:
    found = chunks(COMPLETION, AnswerReport(scored=True, echoed=("ab",), token_ids=True))
    first, second, last = map(only, found)
    assert (first["text"], first["logprobs"]["tokens"], first["prompt_token_ids"]) == (
        "ab",
        ["<s>", "a", "b"],
        [1, 5, 6],
    )
    assert first["logprobs"]["text_offset"] == [0, 0, 1]
    assert (second["text"], second["logprobs"]["text_offset"], second["token_ids"]) == ("c", [2], [7])
    assert last["finish_reason"] == "length"
    alone = chunks(COMPLETION, AnswerReport(echoed=("ab",), prompt_only=True))
    assert "".join(only(one)["text"] for one in alone) == "ab"


def test_ids_of_a_chat_streamed() -> None:
    first, second, _ = chunks(CHAT, AnswerReport(token_ids=True))
    assert first["prompt_token_ids"] == [1, 5, 6] and "prompt_token_ids" not in second
    assert only(second)["token_ids"] == [7]


def test_usage_of_a_stream() -> None:
    def told(report: AnswerReport) -> list[object]:
        return [chunk.get("usage", "none") for chunk in chunks(CHAT, report)]

    assert told(AnswerReport()) == ["none"] * 3
    *before, last = told(AnswerReport(include_usage=True))
    assert before == [None] * 3 and isinstance(last, dict) and last["total_tokens"] == 4
    counted = told(AnswerReport(include_usage=True, continuous_usage=True))
    assert [one["completion_tokens"] for one in counted if isinstance(one, dict)] == [0, 1, 1, 1]
    assert [one["prompt_tokens"] for one in counted if isinstance(one, dict)] == [3, 3, 3, 3]


def test_streams_of_several_prompts_are_one() -> None:
    report = AnswerReport(echoed=("x", "y"), include_usage=True, num_prompts=2)
    *found, last = chunks(COMPLETION, report, (0, 1))
    texts = {index: "".join(only(one)["text"] for one in found if only(one)["index"] == index) for index in (0, 1)}
    assert texts == {0: "xc", 1: "yc"}
    assert {one["id"] for one in (*found, last)} == {"cmpl-g0"}
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 8


def test_a_first_token_without_text_is_told_at_once() -> None:
    def told(dialect: Dialect, report: AnswerReport) -> list[bytes]:
        made = Chunks(dialect, 1, report)
        deltas = [types_pb2.Delta(consumed=1), types_pb2.Delta(consumed=1), types_pb2.Delta(consumed=1, text="c")]
        events = [Event(accepted=types_pb2.Accepted(generation_id="g")), *(Event(delta=delta) for delta in deltas)]
        return [made.of(0, [event]) for event in events]

    plain = told(COMPLETION, AnswerReport())
    assert [piece.count(b"data: ") for piece in plain] == [0, 1, 0, 1]
    assert b'"text":""' in plain[1] and b'"finish_reason":null' in plain[1]
    echoed = told(COMPLETION, AnswerReport(echoed=("ab",)))
    assert [piece.count(b"data: ") for piece in echoed] == [0, 1, 0, 1] and b'"text":"ab"' in echoed[1]
    assert [piece.count(b"data: ") for piece in told(CHAT, AnswerReport())] == [0, 1, 0, 1]  # its role comes first
