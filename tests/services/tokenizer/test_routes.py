"""Long texts are encoded in processes of their own, apart from short ones, with the same result."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sluice_server.engine.request import Limits, Pooling, SamplingParams
from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.messages import (
    Append,
    Cancel,
    Envelope,
    Failed,
    Inputs,
    Message,
    Prompt,
    Result,
    Submit,
)
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Detokenize,
    Embed,
    Generate,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    VectorOptions,
    Work,
    pack_ids,
    unpack_ids,
)
from sluice_server.services.process.background import NICENESS
from sluice_server.services.tokenizer.answers import Answers
from sluice_server.services.tokenizer.child_pool import CpuTimeLimit
from sluice_server.services.tokenizer.encoders import Encoders
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.inline_executor import MAX_TEXT_BYTES
from sluice_server.services.tokenizer.routes import MIDDLE_BYTES, SHORT_BYTES, EncodingPool, size_of
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.executors import OnDemand
from tests.services.tokenizer.constrain import idle_constraints

PARAMS = SamplingParams(max_tokens=4)
LIMITS = Limits(context_length=1 << 20, vocab_size=404)
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    byte_level_bpe(found)
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def encoder(directory: Path) -> Iterator[TextEncoder]:
    with contextlib.closing(TextEncoder.load(directory)) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def encoders(directory: Path) -> Iterator[Encoders]:
    with contextlib.closing(Encoders(directory, LIMITS)) as encoders:
        yield encoders


def submit(name: str, size: int, tenant: str = "", **fields: int) -> Submit:
    work = Generate(TextPrompt("a" * size), PARAMS, **fields)  # type: ignore[arg-type] # numbers only
    return Submit(Envelope(name, "g", tenant), work)


class Rig:
    def __init__(self, encoder: TextEncoder, encoders: Encoders, limits: Limits = LIMITS) -> None:
        self.out: list[Message] = []
        self.pools = {name: OnDemand() for name in ("short", "chats", "middle", "long")}
        apart = [(MIDDLE_BYTES, "middle"), (1 << 20, "long")]
        threads = EncodingThreads(
            self.pools["short"],
            lambda call: call(),
            self.pools["chats"],
            tuple(EncodingPool(size, self.pools[name], encoders) for size, name in apart),
        )
        self.stage = TokenizerStage(encoder, idle_constraints(), limits, threads, self.out.append, lambda *_: None)

    def waiting(self) -> dict[str, int]:
        return {name: len(pool.waiting) for name, pool in self.pools.items() if pool.waiting}

    def run(self) -> list[str]:
        """The results after all jobs have run."""
        for pool in self.pools.values():
            while pool.waiting:
                pool.waiting.pop(0)()
        return [message.envelope.request_id for message in self.out if isinstance(message, Prompt | Result | Failed)]


def test_each_size_has_its_place(encoder: TextEncoder, encoders: Encoders) -> None:
    rig = Rig(encoder, encoders)
    for number, size in enumerate((MAX_TEXT_BYTES + 1, SHORT_BYTES + 1, MIDDLE_BYTES + 1)):
        rig.stage.handle(submit(str(number), size, keep_last=3))
    chat = ChatPrompt((ChatMessage("user", "hello"),))
    rig.stage.handle(Submit(Envelope("3", "g"), Generate(chat, PARAMS)))
    assert rig.waiting() == {"short": 1, "middle": 1, "long": 1, "chats": 1}
    assert sorted(rig.run()) == ["0", "1", "2", "3"] and rig.stage.num_encoding == 0
    assert all(isinstance(message, Prompt) for message in rig.out)


@pytest.mark.parametrize("size", [10, SHORT_BYTES + 1, MIDDLE_BYTES + 1])
def test_a_query_and_a_document_of_any_size_are_rendered_here(
    size: int, encoder: TextEncoder, encoders: Encoders
) -> None:
    rig = Rig(encoder, encoders)
    pair = ChatPrompt((ChatMessage("query", "a"), ChatMessage("document", "b" * size)))
    options = VectorOptions(Pooling.CLASSES, normalize=False, dimensions=1)
    rig.stage.handle(Submit(Envelope("0", "g"), Embed((pair,), options)))
    assert rig.waiting() == {"chats": 1}
    rig.run()
    (made,) = rig.out
    assert isinstance(made, Inputs)


def test_a_short_text_passes_longer_ones(encoder: TextEncoder) -> None:
    """Also with a single thread."""
    out: list[Message] = []
    pool = OnDemand()
    threads = EncodingThreads(pool, lambda call: call())
    stage = TokenizerStage(encoder, idle_constraints(), LIMITS, threads, out.append, lambda *_: None)
    for number in range(3):
        stage.handle(submit(f"long{number}", 100_000))
    stage.handle(submit("short", MAX_TEXT_BYTES + 1))
    pool.waiting.pop(0)()
    assert [message.envelope.request_id for message in out if isinstance(message, Prompt)] == ["short"]


def test_too_much_of_one_tenant_is_refused_and_others_are_not(encoder: TextEncoder, encoders: Encoders) -> None:
    rig = Rig(encoder, encoders)
    for number in range(12):
        rig.stage.handle(submit(f"a{number}", 1 << 20, "a", keep_last=1))
    refused = [message for message in rig.out if isinstance(message, Failed)]
    assert len(refused) == 4 and {message.reason for message in refused} == {"QUEUE_FULL"}
    assert all(message.retry_after_s > 0 for message in refused)
    rig.stage.handle(submit("b", 1 << 20, "b", keep_last=1))
    for number in range(8):
        rig.stage.handle(Cancel(Envelope(f"a{number}", "g", "a")))
    rig.stage.handle(submit("again", 1 << 20, "a", keep_last=1))
    rig.out.clear()
    assert sorted(rig.run()) == ["again", "b"]  # what was cancelled left its place


WORKS: dict[str, Work] = {
    "cut": Generate(TextPrompt("hello <s> é 😀" * 20), PARAMS, keep_last=5, echo=True),
    "whole": Generate(TextPrompt("hello wörld"), PARAMS, more=(TextPrompt(" and"),), bad_words=("fox",)),
    "ids": Generate(TokenPrompt(pack_ids([3, 4, 5])), PARAMS),
    "bad ids": Generate(TokenPrompt(pack_ids([3, 404])), PARAMS),
    "tokenize": Tokenize(TextPrompt("hello 😀 world")),
    "detokenize": Detokenize(pack_ids(range(3, 40))),
    "chat": Generate(ChatPrompt((ChatMessage("user", "hello <b>"),)), PARAMS),
}


@pytest.mark.parametrize("name", list(WORKS))
def test_a_process_of_its_own_makes_the_same(name: str, encoder: TextEncoder, encoders: Encoders) -> None:
    message, answers = Submit(Envelope(name, "g"), WORKS[name]), Answers(encoder, LIMITS)
    start = time.monotonic()
    here, there = (
        answers.answer(message, start),
        encoders.answer(message, start, answers.prepare(message)),
    )
    assert type(here.answer) is type(there.answer)
    assert here.prompt_report == there.prompt_report and here.job == there.job
    if isinstance(here.answer, Prompt) and isinstance(there.answer, Prompt):
        assert (here.answer.ids, here.answer.params) == (there.answer.ids, there.answer.params)
    else:
        assert here.answer == there.answer


def test_a_piece_that_follows_is_encoded_there_too(encoder: TextEncoder, encoders: Encoders) -> None:
    message = Append(Envelope("a", "g"), TextPrompt(" more"), 3)
    there = encoders.answer(message, 0.0, None)
    assert there.answer == Answers(encoder, LIMITS).answer(message, 0.0).answer


def test_it_is_encoded_in_the_background(directory: Path) -> None:
    before = set(psutil.Process().children())
    with contextlib.closing(Encoders(directory, LIMITS)) as encoders:
        encoders.answer(Submit(Envelope("a", "g"), WORKS["tokenize"]), 0.0, None)
        (child,) = set(psutil.Process().children()) - before
        assert child.nice() == min(19, psutil.Process().nice() + NICENESS) and os.getsid(child.pid) == child.pid


def test_what_takes_too_long_ends_its_request_and_no_other(directory: Path) -> None:
    message = Submit(Envelope("a", "g"), Tokenize(TextPrompt("hello " * 50_000)))  # no answer is there at once
    with contextlib.closing(Encoders(directory, LIMITS, patience=CpuTimeLimit(10.0, -1.0))) as encoders:
        for _ in range(2):
            (answer,) = (encoders.answer(message, 0.0, None).answer,)
            assert isinstance(answer, Failed) and answer.field == "prompt" and "make it shorter" in answer.message


def test_sizes_are_those_of_the_work() -> None:
    def size(work: Generate | Tokenize | Detokenize) -> int:
        return size_of(Submit(Envelope("a", "g"), work))

    assert size(Tokenize(TextPrompt("é" * 10))) == 20
    assert size(Generate(TokenPrompt(bytes(1600)), PARAMS, more=(TextPrompt("abc"),))) == 103
    assert size(Detokenize(bytes(1600))) == 400
    assert size(Tokenize(ChatPrompt((ChatMessage("user", "a" * 500),)))) > 500
    assert size_of(Append(Envelope("a", "g"), TextPrompt("abcd"), 0)) == 4


def test_what_cannot_fit_is_refused_before_it_is_encoded(encoder: TextEncoder) -> None:
    made = Answers(encoder, Limits(100, 404)).answer(submit("a", 10_000), 0.0)
    assert isinstance(made.answer, Failed) and made.answer.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "10000 bytes" in made.answer.message
    cut = Answers(encoder, Limits(100, 404)).answer(submit("a", 10_000, keep_last=9), 0.0)
    assert isinstance(cut.answer, Prompt) and len(cut.answer.ids) == 36


def test_tokens_and_their_bytes_are_told_apart(encoder: TextEncoder) -> None:
    answers = Answers(encoder, LIMITS)
    told = answers.answer(Submit(Envelope("a", "g"), Tokenize(TextPrompt("hello é hello é"))), 0.0).answer
    assert isinstance(told, Result) and isinstance(told.value, Tokenized)
    pieces = told.value.pieces
    assert b"".join([pieces[token] for token in unpack_ids(told.value.ids)]).decode() == "hello é hello é"
    assert len(pieces) == len(set(unpack_ids(told.value.ids))) < len(told.value.ids) // 4  # each once
    back = answers.answer(Submit(Envelope("a", "g"), Detokenize(told.value.ids)), 0.0).answer
    assert back == Result(Envelope("a", "g"), Detokenized("hello é hello é"))
