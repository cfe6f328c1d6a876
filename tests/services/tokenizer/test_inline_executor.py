"""Work that the tokenizer does inline: ids are checked and short texts encoded on arrival, longer ones in a thread."""

from pathlib import Path

import pytest

from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.messages.messages import Append, Cancel, Envelope, Failed, Message, Prompt, Submit
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Generate,
    PromptInput,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    pack_ids,
)
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.inline_executor import MAX_BYTES, MAX_TEXT_BYTES, InlineExecutor, is_brief
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.executors import OnDemand
from tests.services.tokenizer.constrain import idle_constraints

ENVELOPE, PARAMS = Envelope("a", "g"), SamplingParams(max_tokens=4)
IDS = TokenPrompt(pack_ids([5, 6, 7]))
LONGER = TextPrompt("hello " * MAX_TEXT_BYTES)


def stage(directory: Path, out: list[Message], pool: OnDemand) -> TokenizerStage:
    byte_level_bpe(directory)
    limits, threads = Limits(context_length=100, vocab_size=404), EncodingThreads(pool, lambda call: call())
    return TokenizerStage(TextEncoder.load(directory), idle_constraints(), limits, threads, out.append, lambda *_: None)


@pytest.mark.parametrize("prompt", [IDS, TextPrompt("hello")], ids=["ids", "text"])
def test_brief_prompts_pass_before_text_that_came_first(tmp_path: Path, prompt: PromptInput) -> None:
    out: list[Message] = []
    pool = OnDemand()
    tokenizer = stage(tmp_path, out, pool)
    tokenizer.handle(Submit(Envelope("b", "g"), Generate(LONGER, PARAMS)))
    tokenizer.handle(Submit(ENVELOPE, Generate(prompt, PARAMS)))
    assert [one.envelope.request_id for one in out if isinstance(one, Prompt)] == ["a"] and tokenizer.num_encoding == 1
    tokenizer.handle(Cancel(ENVELOPE))
    assert isinstance(out[-1], Cancel) and tokenizer.num_encoding == 1


def test_ids_that_may_not_be_are_refused_at_once(tmp_path: Path) -> None:
    out: list[Message] = []
    stage(tmp_path, out, OnDemand()).handle(Submit(ENVELOPE, Generate(TokenPrompt(pack_ids([500])), PARAMS)))
    (refused,) = out
    assert isinstance(refused, Failed) and refused.field == "prompt.token_ids[0]"


def test_what_takes_long_or_has_several_answers_is_not_brief() -> None:
    for prompt in (IDS, TextPrompt("x" * MAX_TEXT_BYTES), TextPrompt("\ud800")):
        assert is_brief(Submit(ENVELOPE, Generate(prompt, PARAMS)))
    for work in (
        Generate(LONGER, PARAMS),
        Generate(TextPrompt("é" * MAX_TEXT_BYTES), PARAMS),
        Generate(ChatPrompt((ChatMessage("user", "hello"),)), PARAMS),
        Generate(TextPrompt("hello"), PARAMS, bad_words=("bad",)),
        Generate(TokenPrompt(bytes(MAX_BYTES + 4)), PARAMS),
        Generate(IDS, PARAMS, echo=True),
        Generate(IDS, PARAMS, more=(TextPrompt("and more"),)),
        Generate(IDS, PARAMS, bad_words=("bad",)),
        Tokenize(IDS),
        Tokenize(TextPrompt("hello")),
    ):
        assert not is_brief(Submit(ENVELOPE, work))
    assert not is_brief(Append(ENVELOPE, TextPrompt("hello"), 0))


def test_what_is_raised_is_in_the_future() -> None:
    future = InlineExecutor().submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.result()
