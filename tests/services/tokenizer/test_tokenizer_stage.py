"""The tokenizer stage by hand: the prompt's echo, truncation, and what is refused on exact tokens."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from engine.request import Limits, SamplingParams
from services.messages import Cancel, Envelope, Failed, Message, Prompt, Result, Submit, Tokenized
from services.tokenizer.encoding import TextEncoder
from services.tokenizer.stage import TokenizerStage
from services.work import Generate, TextPrompt, unpack_ids
from tests.oracle.tokenizers import byte_level_bpe

ENVELOPE = Envelope("a", "g")
TEXT = "hello world, the quick brown fox"


class Now(Executor):
    """Does what it is given at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as Executor has it
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    byte_level_bpe(tmp_path)
    return TextEncoder.load(tmp_path)


def sent(encoder: TextEncoder, work: Generate, context: int = 100) -> list[Message]:
    out: list[Message] = []
    limits = Limits(context_length=context, vocab_size=404)
    stage = TokenizerStage(encoder, limits, Now(), out.append, lambda call: call(), lambda *_: None)
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
    assert TEXT.encode().endswith(b"".join(told.value.pieces))
    (longer,) = sent(encoder, generate(keep_last=90))
    assert isinstance(longer, Prompt) and longer.ids == whole.ids


def test_the_context_bounds_what_is_kept(encoder: TextEncoder) -> None:
    (refused,) = sent(encoder, generate(echo=True), context=8)
    assert isinstance(refused, Failed) and refused.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert isinstance(sent(encoder, generate(keep_last=4), context=8)[0], Prompt)


def test_a_cancel_of_one_output_leaves_the_encoding(encoder: TextEncoder) -> None:
    out: list[Message] = []

    class Later(Executor):
        """Does nothing yet."""

        def __init__(self) -> None:
            self.future: Future[Any] = Future()

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as above
            return self.future

    later = Later()
    stage = TokenizerStage(encoder, Limits(100, 404), later, out.append, lambda call: call(), lambda *_: None)
    stage.handle(Submit(ENVELOPE, generate()))
    stage.handle(Cancel(ENVELOPE, output_index=1))
    assert stage.num_encoding == 1
    stage.handle(Cancel(ENVELOPE))
    assert stage.num_encoding == 0 and later.future.cancelled()
    assert out == [Cancel(ENVELOPE)]  # that of the output waited behind the prompt, and went with it
