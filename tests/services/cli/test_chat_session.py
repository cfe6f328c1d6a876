"""A chat session, with a client that is a stand-in."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import sluice
import sluice.stream
from rich.console import Console
from sluice.v1 import types_pb2

from sluice_server.engine.request import Limits
from sluice_server.services.cli.answer_display import AnswerDisplay, PlainDisplay
from sluice_server.services.cli.chat_session import ChatSession
from sluice_server.services.cli.dialogue import Dialogue

LENGTH = types_pb2.FINISH_REASON_LENGTH


class Progress:
    def __init__(self, reason: "types_pb2.FinishReason.ValueType") -> None:
        self.ends = {0: types_pb2.OutputFinished(finish_reason=reason)}
        self.finished = types_pb2.Finished(usage=types_pb2.Usage(prompt_tokens=5, completion_tokens=2))


class Answering:
    """A client whose answers are given: texts, and perhaps how they break off. A conversation of more than `room`
    messages exceeds its context."""

    def __init__(self, *answer: str | BaseException, room: int = 100) -> None:
        self.answer = answer
        self.room = room
        self.reason = types_pb2.FINISH_REASON_EOS
        self.asked: list[list[str]] = []
        self.options: dict[str, Any] = {}
        self.num_cancelled = 0

    def stream(self, chat: types_pb2.Chat, **options: Any) -> "sluice.stream.Stream":  # noqa: ANN401 # as the SDK's
        self.asked.append([message.parts[0].text for message in chat.messages])
        self.options = options
        return cast(sluice.stream.Stream, OneStream(self, len(chat.messages)))


class OneStream:
    def __init__(self, client: Answering, num_messages: int) -> None:
        self._client = client
        self._num_messages = num_messages
        self.progress = Progress(client.reason)

    def cancel(self) -> None:
        self._client.num_cancelled += 1

    def __iter__(self) -> Iterator[types_pb2.Delta]:
        if self._num_messages > self._client.room:
            raise sluice.InvalidArgument("prompt has many tokens", reason="CONTEXT_LENGTH_EXCEEDED")
        for piece in self._client.answer:
            if isinstance(piece, BaseException):
                raise piece
            yield types_pb2.Delta(text=piece, consumed=1)


def plain(console: Console) -> AnswerDisplay:
    return PlainDisplay()


def session_of(client: object, dialogue: Dialogue | None = None) -> tuple[ChatSession, Dialogue]:
    dialogue = dialogue or Dialogue(defaults={"max_tokens": 9, "temperature": 0.7}, limits=Limits(1000, 100))
    return ChatSession(cast(sluice.Client, client), dialogue, "localhost:1", "m", plain), dialogue


class Interrupting:
    """A client whose call is interrupted before it returns a stream."""

    def stream(self, *_: object, **options: object) -> "sluice.stream.Stream":
        raise KeyboardInterrupt


def test_an_interrupt_before_there_is_a_stream_stops_the_answer_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    session, dialogue = session_of(Interrupting())
    session.turn("hello")
    assert "stopped" in capsys.readouterr().out and dialogue.unanswered == "hello"


def test_an_interrupted_answer_is_cancelled_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answering("one ", "two", KeyboardInterrupt())
    session, dialogue = session_of(client)
    session.turn("count")
    assert capsys.readouterr().out == "one two\nstopped\n"
    assert client.num_cancelled == 1 and dialogue.turns == [("user", "count"), ("assistant", "one two")]


def test_an_interrupt_leaves_a_question_that_was_piped() -> None:
    session, _ = session_of(Answering("one", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        session.ask("count")


def test_a_failure_is_one_line_and_its_question_can_be_retried(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answering(sluice.Unavailable("it\nbroke"))
    session, dialogue = session_of(client)
    session.turn("a")
    assert capsys.readouterr().err == "error: UNAVAILABLE: it broke\n"
    assert dialogue.turns == [] and dialogue.unanswered == "a"
    client.answer = ("yes",)
    session.turn("/retry")
    assert client.asked == [["a"], ["a"]] and dialogue.turns[-1] == ("assistant", "yes")


def test_what_a_server_that_died_had_said_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    session, dialogue = session_of(Answering("half", sluice.Unavailable("failed to connect to all addresses")))
    session.turn("a")
    said = capsys.readouterr()
    assert said.out == "half\n" and said.err.startswith("error: no server answers at localhost:1")
    assert dialogue.turns[-1] == ("assistant", "half")


def test_the_oldest_turns_leave_a_conversation_that_is_too_long_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = Answering("yes", room=4)
    session, dialogue = session_of(client)
    dialogue.system = "be brief"
    for question in "abcd":
        session.turn(question)
    assert client.asked[-1] == ["be brief", "c", "yes", "d"]
    assert dialogue.turns == [("user", "c"), ("assistant", "yes"), ("user", "d"), ("assistant", "yes")]
    assert capsys.readouterr().out.count("left out") == 1


def test_a_question_that_is_itself_too_long_costs_nothing_of_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = Answering("yes")
    session, dialogue = session_of(client)
    session.turn("a")
    session.turn("b")
    client.room = 0
    session.turn("long")
    assert "lower --max-tokens" in capsys.readouterr().err
    assert [text for _, text in dialogue.turns] == ["a", "yes", "b", "yes"]


def test_an_answer_that_reaches_its_limit_says_which_option_allows_more(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answering("a", "b")
    client.reason = LENGTH
    session, _ = session_of(client)
    session.turn("count")
    said = capsys.readouterr().out
    assert "stopped at 9 tokens; --max-tokens" in said
    assert "2 tokens, first after" in said and "context 7 of 1,000" in said
    assert client.options == {"model": "m", "max_tokens": 9, "temperature": 0.7}


def test_the_answer_to_a_piped_question_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answering("a\x1b[2J")
    client.reason = LENGTH
    session, _ = session_of(client)
    assert session.ask("/count")
    said = capsys.readouterr()
    assert said.out == "a\x1b[2J\n" and "stopped at 9 tokens" in said.err and client.asked == [["/count"]]


def test_commands_are_answered_here(capsys: pytest.CaptureFixture[str]) -> None:
    client = Answering()
    session, _ = session_of(client)
    session.turn("/set top_p [2]")
    session.turn("")
    assert capsys.readouterr().out == "'[2]' is no number for top_p\n" and not client.asked
