"""The tokenizer stage alone: the prompt's echo, truncation, and refusals by exact token counts."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.engine.requests import request_of
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Message, Prompt, Result, Submit
from sluice_server.services.messages.work import (
    Constraint,
    ConstraintForm,
    Generate,
    TextPrompt,
    TokenPrompt,
    pack_ids,
    unpack_ids,
)
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.tokenizer.constrain import idle_constraints

ENVELOPE = Envelope("a", "g")
TEXT = "hello world, the quick brown fox"


class Now(Executor):
    """An executor that runs each job at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as Executor has it
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    byte_level_bpe(tmp_path)
    return TextEncoder.load(tmp_path)


def sent(encoder: TextEncoder, work: Generate, context: int = 100, width: int = 0) -> list[Message]:
    out: list[Message] = []
    limits = Limits(context_length=context, vocab_size=404, embeds_width=width)
    stage = TokenizerStage(
        encoder, idle_constraints(), limits, EncodingThreads(Now(), lambda call: call()), out.append, lambda *_: None
    )
    stage.handle(Submit(ENVELOPE, work))
    return out


def generate(**fields: Any) -> Generate:  # noqa: ANN401 # any field
    return Generate(TextPrompt(TEXT), SamplingParams(max_tokens=4), **fields)


def test_the_last_tokens_are_kept_and_echoed_ahead_of_the_prompt(encoder: TextEncoder) -> None:
    (whole,) = sent(encoder, generate())
    assert isinstance(whole, Prompt)
    told, kept = sent(encoder, generate(echo=True, keep_last=5))
    assert isinstance(told, Result) and isinstance(told.value, Tokenized) and isinstance(kept, Prompt)
    assert unpack_ids(kept.ids) == unpack_ids(whole.ids)[-5:] and told.value.ids == kept.ids
    assert TEXT.encode().endswith(b"".join([told.value.pieces[token] for token in unpack_ids(kept.ids)]))
    (longer,) = sent(encoder, generate(keep_last=90))
    assert isinstance(longer, Prompt) and longer.ids == whole.ids


def test_embeddings_go_ahead_of_a_prompt_with_a_placeholder_for_each(encoder: TextEncoder) -> None:
    embeds = PromptEmbeds(bytes(2 * 3 * 4), EmbedsType.FLOAT32, 3)
    ids = pack_ids([7, 9])
    for prompt, following in ((TokenPrompt(ids), [7, 9]), (TokenPrompt(b""), [])):
        work = Generate(prompt, SamplingParams(max_tokens=4), embeds=embeds)
        (made,) = sent(encoder, work, width=2)
        assert isinstance(made, Prompt)
        assert [*unpack_ids(made.ids)] == [0, 0, 0, *following]
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Prompt)
        request = request_of(decoded, 0.0, UNNAMED, None)
        assert request.prompt_embeds == embeds and request.prompt_ids == (0, 0, 0, *following)


def test_embeddings_are_refused_where_they_are_off_or_exceed_the_context(encoder: TextEncoder) -> None:
    embeds = PromptEmbeds(bytes(2 * 3 * 4), EmbedsType.FLOAT32, 3)
    work = Generate(TokenPrompt(pack_ids([7, 9])), SamplingParams(max_tokens=4), embeds=embeds)
    (off,) = sent(encoder, work)
    assert isinstance(off, Failed) and off.reason == "FEATURE_UNSUPPORTED"
    (longer,) = sent(encoder, work, context=8, width=2)
    assert isinstance(longer, Failed) and longer.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_the_context_bounds_what_is_kept(encoder: TextEncoder) -> None:
    (refused,) = sent(encoder, generate(echo=True), context=8)
    assert isinstance(refused, Failed) and refused.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert isinstance(sent(encoder, generate(keep_last=4), context=8)[0], Prompt)


def test_a_cancel_of_one_output_leaves_the_encoding(encoder: TextEncoder) -> None:
    out: list[Message] = []

    later = Later()
    stage = TokenizerStage(
        encoder,
        idle_constraints(),
        Limits(100, 404),
        EncodingThreads(later, lambda call: call()),
        out.append,
        lambda *_: None,
    )
    stage.handle(Submit(ENVELOPE, generate(echo=True)))
    stage.handle(Cancel(ENVELOPE, output_index=1))
    assert stage.num_encoding == 1
    stage.handle(Cancel(ENVELOPE))
    for run in later.waiting:
        run()
    assert stage.num_encoding == 0
    assert out == [Cancel(ENVELOPE)]  # that of the output waited behind the prompt, and went with it


class Later(Executor):
    """An executor that runs its jobs when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as Executor has it
        future: Future[Any] = Future()
        self.waiting.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future


@pytest.fixture
def constraints(tmp_path: Path, encoder: TextEncoder) -> Iterator[Constraints]:
    constraints = Constraints(tmp_path / "tokenizer.json", 404, (1,))
    constraints.executor.shutdown()
    constraints.executor = Later()  # type: ignore[assignment] # an executor
    yield constraints
    constraints.executor = Now()  # type: ignore[assignment] # an executor
    constraints.close()


def test_a_prompt_waits_for_its_grammar_and_no_other_does(encoder: TextEncoder, constraints: Constraints) -> None:
    out: list[Message] = []
    limits, compiling = Limits(context_length=100, vocab_size=404), constraints.executor
    assert isinstance(compiling, Later)
    stage = TokenizerStage(
        encoder, constraints, limits, EncodingThreads(Now(), lambda call: call()), out.append, lambda *_: None
    )

    def ask(name: str, regex: str = "") -> None:
        constraint = Constraint(ConstraintForm.REGEX, regex) if regex else None
        stage.handle(Submit(Envelope(name, "g", time_left_s=9.0), generate(constraint=constraint)))

    for name, regex in (("slow", "a+"), ("free", ""), ("gone", "b+"), ("bad", "(")):
        ask(name, regex)
    stage.handle(Cancel(Envelope("gone", "g")))
    assert [one.envelope.request_id for one in out if isinstance(one, Prompt)] == ["free"] and stage.num_encoding == 2
    for run in compiling.waiting:
        run()
    failure, slow = out[-1], out[-2]
    assert isinstance(slow, Prompt) and "a+" in slow.params.grammar and slow.envelope.time_left_s is not None
    assert slow.envelope.time_left_s < 9.0 - slow.tokenize_s / 2 and slow.envelope.request_id == "slow"
    assert isinstance(failure, Failed) and failure.field == "constraint.regex" and len(out) == 4
    ask("again", "a+")  # which is known
    assert isinstance(out[-1], Prompt) and out[-1].params.grammar == slow.params.grammar
