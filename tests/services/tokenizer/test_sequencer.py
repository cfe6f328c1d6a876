"""Messages of one request keep their order through the tokenizer, however long the encoding takes."""

from pathlib import Path

import pytest

from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.messages.messages import (
    Append,
    Cancel,
    CloseInput,
    Envelope,
    Failed,
    Grant,
    Message,
    Prompt,
    Submit,
    Update,
)
from sluice_server.services.messages.work import Generate, TextPrompt, TokenPrompt, pack_ids
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.executors import OnDemand
from tests.services.tokenizer.constrain import idle_constraints

ENVELOPE = Envelope("a", "g")


class Rig:
    def __init__(self, directory: Path) -> None:
        byte_level_bpe(directory)
        self.out: list[Message] = []
        self.pool = OnDemand()
        self.encoder = TextEncoder.load(directory)
        limits = Limits(context_length=100, vocab_size=404, max_prompt_bytes=60)
        self.stage = TokenizerStage(
            self.encoder,
            idle_constraints(),
            limits,
            EncodingThreads(self.pool, lambda call: call()),
            self.out.append,
            lambda *_: None,
        )

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.stage.handle(message)

    @property
    def kinds(self) -> list[type[Message]]:
        return [type(message) for message in self.out]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def submit(text: str = "hello", attempt: int = 0) -> Submit:
    """A prompt that is not encoded inline, as it has words to encode besides."""
    work = Generate(TextPrompt(text), SamplingParams(max_tokens=4), bad_words=("fox",))
    return Submit(Envelope("a", "g", attempt=attempt), work)


def test_what_follows_waits_for_the_prompt_and_for_each_text_before_it(rig: Rig) -> None:
    ids = TokenPrompt(pack_ids([1, 2]))
    rig.send(submit(), Grant(ENVELOPE, 1), Append(ENVELOPE, TextPrompt(" world")), Append(ENVELOPE, ids))
    rig.send(Update(ENVELOPE, priority=3), Append(ENVELOPE, TextPrompt("!")), CloseInput(ENVELOPE))
    assert rig.out == []
    rig.pool.waiting.pop(0)()
    assert rig.kinds == [Prompt, Grant]
    rig.send(Grant(ENVELOPE, 2))
    rig.pool.waiting.pop(0)()
    assert rig.kinds == [Prompt, Grant, Append, Append, Update]
    rig.pool.waiting.pop(0)()
    assert rig.kinds[5:] == [Append, CloseInput, Grant] and rig.stage.num_encoding == 0
    pieces = [message.piece for message in rig.out if isinstance(message, Append)]
    assert pieces[1] == ids and all(isinstance(piece, TokenPrompt) for piece in pieces)
    assert rig.encoder.decode(pieces[0].ids, Limits(100, 404), False) == " world"  # type: ignore[union-attr] # as above
    rig.send(Append(ENVELOPE, ids), Cancel(ENVELOPE, output_index=0))
    assert rig.kinds[8:] == [Append, Cancel]


def test_a_piece_keeps_its_place_among_the_changes(rig: Rig) -> None:
    rig.send(submit(), Append(ENVELOPE, TextPrompt("a"), 3), Grant(ENVELOPE, 1, 4))
    rig.pool.waiting.pop(0)()
    rig.pool.waiting.pop(0)()
    assert [message.index for message in rig.out if isinstance(message, Append | Grant)] == [3, 4]


def test_other_requests_pass_meanwhile(rig: Rig) -> None:
    other = Envelope("b", "g")
    rig.send(submit(), Grant(ENVELOPE, 1), Grant(other, 1))
    assert rig.out == [Grant(other, 1)]


def test_time_to_a_deadline_runs_while_it_waits(rig: Rig) -> None:
    rig.send(submit(), Update(ENVELOPE, time_left_s=10.0))
    rig.pool.waiting.pop(0)()
    (update,) = [message for message in rig.out if isinstance(message, Update)]
    assert update.time_left_s is not None and update.time_left_s < 10.0


def test_a_piece_that_cannot_be_encoded_ends_its_request_and_what_waits(rig: Rig) -> None:
    rig.send(submit(), Append(ENVELOPE, TextPrompt("x" * 61)), Grant(ENVELOPE, 1))
    rig.pool.waiting.pop(0)()
    rig.pool.waiting.pop(0)()
    assert rig.kinds == [Prompt, Failed] and rig.stage.num_encoding == 0
    error = rig.out[-1]
    assert isinstance(error, Failed) and error.field == "append.text"


def test_a_cancel_drops_what_waits(rig: Rig) -> None:
    rig.send(submit(), Append(ENVELOPE, TextPrompt("x")), Grant(ENVELOPE, 1), Cancel(ENVELOPE))
    rig.pool.waiting.pop(0)()
    assert rig.kinds == [Cancel] and rig.stage.num_encoding == 0


def test_a_later_attempt_takes_the_place_of_all_that_waits(rig: Rig) -> None:
    rig.send(
        submit(), Grant(ENVELOPE, 1), submit(attempt=1), Grant(ENVELOPE, 2), Grant(Envelope("a", "g", attempt=1), 3)
    )
    while rig.pool.waiting:
        rig.pool.waiting.pop(0)()
    assert rig.kinds == [Prompt, Grant]
    assert [message.envelope.attempt for message in rig.out if isinstance(message, Prompt | Grant)] == [1, 1]
