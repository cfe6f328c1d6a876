"""The inputs of Embed at the tokenizer: special tokens, instruction, truncation, errors that name the input."""

from pathlib import Path

import pytest
from tokenizers import processors

from sluice_server.engine.request import Limits, Pooling
from sluice_server.services.messages.messages import Failed, Inputs, Message, Submit
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Embed,
    PairPrompt,
    PromptInput,
    TextPrompt,
    TokenPrompt,
    Truncation,
    VectorOptions,
    pack_ids,
    unpack_ids,
)
from sluice_server.services.tokenizer.encoding import TextEncoder, longest_first
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.tokenizer.constrain import idle_constraints
from tests.services.tokenizer.test_tokenizer_stage import ENVELOPE, Now

TEXT = "hello world, the quick brown fox jumps over the lazy dog twice"
OPTIONS = VectorOptions(Pooling.LAST, normalize=True, dimensions=4)
LIMITS = Limits(context_length=8, vocab_size=404)


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    """A tokenizer that puts a token before and one behind every text."""
    tokenizer = byte_level_bpe(tmp_path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextEncoder.load(tmp_path)


def made(encoder: TextEncoder, *inputs: PromptInput | PairPrompt, **fields: object) -> Message:
    """What the stage answers to Embed."""
    out: list[Message] = []
    threads = EncodingThreads(Now(), lambda call: call())
    stage = TokenizerStage(encoder, idle_constraints(), LIMITS, threads, out.append, lambda *_: None)
    stage.handle(Submit(ENVELOPE, Embed(inputs, OPTIONS, **fields)))  # type: ignore[arg-type] # fields of Embed
    (answer,) = out
    return answer


def ids_of(message: Message) -> list[list[int]]:
    assert isinstance(message, Inputs) and message.options == OPTIONS
    return [unpack_ids(packed) for packed in message.ids]


def plain(encoder: TextEncoder, text: str) -> list[int]:
    ids: list[int] = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_texts_get_special_tokens_and_ids_are_used_as_they_are(encoder: TextEncoder) -> None:
    found = ids_of(made(encoder, TextPrompt("hello"), TokenPrompt(pack_ids([7, 8])), TextPrompt("fox")))
    assert found == [[0, *plain(encoder, "hello"), 1], [7, 8], [0, *plain(encoder, "fox"), 1]]


def test_two_texts_are_encoded_as_a_pair(encoder: TextEncoder) -> None:
    (found,) = ids_of(made(encoder, PairPrompt("hello", "fox")))
    assert found == [0, *plain(encoder, "hello"), 1, *plain(encoder, "fox"), 1]
    answer = made(encoder, PairPrompt("hello", "fox"), PairPrompt("hello", TEXT), field="documents")
    assert isinstance(answer, Failed) and answer.field == "documents[1]"
    assert answer.message.startswith("documents[1] has ")


def test_types_tell_the_texts_of_a_pair_apart(encoder: TextEncoder) -> None:
    pair, text = PairPrompt("hello", "fox"), TextPrompt("fox")
    untyped = made(encoder, pair, text)
    assert isinstance(untyped, Inputs) and untyped.num_first == ()
    encoder.tokenizer.post_processor = _pairs("<s> $A </s> $B:1 </s>:1")
    answer = made(encoder, pair, text)
    assert isinstance(answer, Inputs) and ids_of(answer) == ids_of(untyped)
    assert answer.num_first == (len(plain(encoder, "hello")) + 2, len(plain(encoder, "fox")) + 2)
    encoder.tokenizer.post_processor = _pairs("<s>:1 $A </s> $B </s>")
    refused = made(encoder, text, pair, field="pairs")
    assert isinstance(refused, Failed) and refused.reason == "FEATURE_UNSUPPORTED"
    assert refused.message.startswith("pairs[1]: token types of the tokenizer's pairs are supported as 0")


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [
        (3, 2, 5, (3, 2)),
        (9, 2, 5, (3, 2)),
        (2, 9, 5, (2, 3)),
        (9, 8, 5, (3, 2)),
        (8, 9, 5, (2, 3)),
        (9, 9, 5, (2, 3)),
        (9, 9, 0, (0, 0)),
    ],
)
def test_the_longer_text_is_cut_first(first: int, second: int, room: int, kept: tuple[int, int]) -> None:
    assert longest_first(first, second, room) == kept


def test_a_pair_may_be_cut(encoder: TextEncoder) -> None:
    (found,) = ids_of(made(encoder, PairPrompt("fox", TEXT), truncation=Truncation.RIGHT))
    own, rest = plain(encoder, "fox"), plain(encoder, TEXT)
    assert found == [0, *own, 1, *rest[: 5 - len(own)], 1] and len(found) == 8
    (found,) = ids_of(made(encoder, PairPrompt(TEXT, "fox"), truncation=Truncation.LEFT))
    assert found == [0, *rest[-(5 - len(own)) :], 1, *own, 1]
    (whole,) = ids_of(made(encoder, PairPrompt("fox", "fox"), truncation=Truncation.LEFT))
    assert whole == [0, *own, 1, *own, 1]


def _pairs(template: str) -> processors.TemplateProcessing:
    special = [("<s>", 0), ("</s>", 1)]
    return processors.TemplateProcessing(single="<s> $A </s>", pair=template, special_tokens=special)


def test_a_query_and_a_document_are_written_by_the_chat_template(encoder: TextEncoder, tmp_path: Path) -> None:
    turns = ChatPrompt((ChatMessage("query", "a"), ChatMessage("document", "</s>")))
    source = "{% for one in messages %}</s>{{ one.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    ranking = TextEncoder.load(tmp_path)
    (found,) = ids_of(made(ranking, turns))
    assert found[0] == 1 and found.count(1) == 2  # what the document writes is no control token
    assert ranking.tokenizer.decode(found, skip_special_tokens=False) == "</s>a</s></s>"
    ranking.close()


@pytest.mark.parametrize("source", ["", "{{ messages[0].content }}", "{{ messages[1].content }}"])
def test_a_template_without_a_place_for_them_is_refused(encoder: TextEncoder, tmp_path: Path, source: str) -> None:
    if source:
        (tmp_path / "chat_template.jinja").write_text(source)
        encoder = TextEncoder.load(tmp_path)
    turns = ChatPrompt((ChatMessage("query", "a"), ChatMessage("document", "b")))
    answer = made(encoder, turns, field="documents")
    encoder.close()
    assert isinstance(answer, Failed) and answer.field == "documents[0]" and answer.reason == "FEATURE_UNSUPPORTED"
    assert "has no place for turns of the roles query and document" in answer.message


def test_an_instruction_is_encoded_with_the_text(encoder: TextEncoder) -> None:
    assert ids_of(made(encoder, TextPrompt("fox"), instruction="the ")) == [[0, *plain(encoder, "the fox"), 1]]


@pytest.mark.parametrize("truncation", [Truncation.LEFT, Truncation.RIGHT])
def test_truncation_keeps_special_tokens(encoder: TextEncoder, truncation: Truncation) -> None:
    whole = plain(encoder, TEXT)
    assert len(whole) > 8
    kept = whole[-6:] if truncation is Truncation.LEFT else whole[:6]
    ids = TokenPrompt(pack_ids(list(range(10, 30))))
    found = ids_of(made(encoder, TextPrompt(TEXT), TextPrompt("fox"), ids, truncation=truncation))
    assert found[0] == [0, *kept, 1] and found[1] == [0, *plain(encoder, "fox"), 1]
    assert found[2] == list(range(22, 30) if truncation is Truncation.LEFT else range(10, 18))


@pytest.mark.parametrize(
    ("bad", "field", "told"),
    [
        (TextPrompt(TEXT), "inputs[1]", "inputs[1] has "),
        (TokenPrompt(pack_ids([5] * 9)), "inputs[1]", "inputs[1] has 9 tokens; this model allows 8"),
        (TokenPrompt(b""), "inputs[1]", "inputs[1]: has no tokens"),
        (TokenPrompt(pack_ids([404])), "inputs[1][0]", "inputs[1][0]: 404 is not in"),
        (TokenPrompt(b"abc"), "inputs[1]", "inputs[1]: has 3 bytes"),
        (TextPrompt("a\ud800"), "inputs[1]", "inputs[1]: is not valid Unicode"),
    ],
)
def test_an_error_names_the_input(encoder: TextEncoder, bad: TextPrompt | TokenPrompt, field: str, told: str) -> None:
    answer = made(encoder, TextPrompt("fine"), bad)
    assert isinstance(answer, Failed) and answer.field == field and answer.message.startswith(told)
    if isinstance(bad, TextPrompt):
        again = made(encoder, TextPrompt("fine"), bad, truncation=Truncation.RIGHT)
        assert isinstance(again, Failed) == (bad.text != TEXT)
