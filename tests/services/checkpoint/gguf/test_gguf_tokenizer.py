"""Tokenizers made from GGUF metadata: against the tokenizer that was converted, SentencePiece, and known splits."""

import dataclasses
import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer, models

from sluice_server.engine.models.gguf.reader import read_header
from sluice_server.services.checkpoint.gguf.pre_tokenizers import KINDS
from sluice_server.services.checkpoint.gguf.tokenizer import make_tokenizer
from sluice_server.services.text_bound import longest_token
from sluice_server.services.tokenizer.pieces import Pieces
from tests.oracle.gguf_files import Vocabulary, of_tokenizer, write_vocabulary
from tests.oracle.tokenizers import TEXT, byte_level_bpe

AWKWARD = "I'LL don't CamelCASEd x1234  =\n\n  «q»/\n日本! e\u0301"
# Pieces of `AWKWARD`, seen to be those of llama.cpp but for the last one of tekken, gpt-4o and deepseek-v3, where it
# does not know marks.
WORDS = "I|'|LL| don|'t| CamelCASEd| x|1234| | =|\n\n | «|q|»/|\n|日本|!| e|\u0301"
LINES = "I|'LL| don|'t| CamelCASEd| x|123|4| | =\n\n| | «|q|»/\n|日本|!| e|\u0301"
DIGITS = ("1234", "1|2|3|4"), ("123|4", "1|2|3|4")
SPLITS = {
    "default": "I|'|LL| don|'|t| CamelCASEd| x|123|4|  |=|\n\n  |«|q|»/|\n|日本|!| e|\u0301",
    "gpt-2": WORDS,
    "smollm": WORDS.replace(*DIGITS[0]),
    "llama-bpe": LINES,
    "qwen2": LINES.replace(*DIGITS[1]),
    "tekken": "I|'LL| don|'t| Camel|CASEd| x|1|2|3|4| | =\n\n| | «|q|»/\n|日本|!| e\u0301",
    "gpt-4o": "I'LL| don't| Camel|CASEd| x|123|4| | =\n\n| | «|q|»/\n|日本|!| e\u0301",
    "deepseek-llm": "I|'|LL| don|'|t| CamelCASEd| x|1234| | =|\n|\n|  «|q|»|/|\n|日本|!| e|\u0301",
    "deepseek-coder": "I|'|LL| don|'|t| CamelCASEd| x|1|2|3|4|  =|\n|\n| | «|q|»/|\n|日本|!| e|\u0301",
    "deepseek-v3": "I|'LL| don|'t| CamelCASEd| x|123|4| | =\n\n| | «|q|»/\n|日本|!| e\u0301",
}


def texts(num: int = 300) -> list[str]:
    rng = random.Random(0)
    pool = "abcXYZ019 \n\t\r'’.,!?/-_+=<>$€éÉñßДдΩ中日ア한ب½\u0301 \u00a0👍ǅ"
    found = ["", " ", "  a", "<s>hi</s> there", "x<|user|> y", "a    b", "▁mark", *TEXT[:3], AWKWARD]
    return found + ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 24))) for _ in range(num)]


def made(vocabulary: Vocabulary, directory: Path) -> Tokenizer:
    path = directory / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_vocabulary(writer, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (directory / "made.json").write_text(json.dumps(make_tokenizer(read_header(path))))
    return Tokenizer.from_file(str(directory / "made.json"))


def test_byte_level_ids_are_those_of_the_tokenizer_that_was_converted(tmp_path: Path) -> None:
    want = byte_level_bpe(tmp_path)
    size = want.get_vocab_size()
    got = made(of_tokenizer(tmp_path / "tokenizer.json", size, bos_token_id=0, eos_token_id=1), tmp_path)
    for text in texts():
        assert got.encode(text, add_special_tokens=False).ids == want.encode(text, add_special_tokens=False).ids
        assert got.decode(got.encode(text).ids, skip_special_tokens=False) == text
    assert longest_token(tmp_path / "made.json") == longest_token(tmp_path / "tokenizer.json")
    assert Pieces(got).special_ids == Pieces(want).special_ids


@pytest.mark.parametrize("pre", list(SPLITS))
def test_text_is_split_as_the_published_tokenizer_does(pre: str) -> None:
    spec = json.loads(Tokenizer(models.BPE()).to_str())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": KINDS[pre].steps()}
    splitter = Tokenizer.from_str(json.dumps(spec)).pre_tokenizer
    assert splitter is not None
    pieces = [AWKWARD[start:end] for _, (start, end) in splitter.pre_tokenize_str(AWKWARD)]
    assert pieces == SPLITS[pre].split("|")


@pytest.mark.parametrize("pre", list(KINDS))
def test_every_way_of_splitting_keeps_the_text(pre: str, tmp_path: Path) -> None:
    byte_level_bpe(tmp_path)
    vocabulary = of_tokenizer(tmp_path / "tokenizer.json", 500, pre, bos_token_id=0)
    got = made(vocabulary, tmp_path)
    for text in (AWKWARD, *TEXT[:3]):
        ids = got.encode(text, add_special_tokens=False).ids
        composed = text.replace("e\u0301", "é") if KINDS[pre].composes else text
        assert got.decode(ids, skip_special_tokens=False) == composed
    assert (got.encode("a").ids[0] == 0) is KINDS[pre].adds_bos
    assert longest_token(tmp_path / "made.json") > 0 or KINDS[pre].composes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    directory = tmp_path_factory.mktemp("sentencepiece")
    (directory / "text").write_text("\n".join(line for text in texts(600) for line in text.splitlines()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "model"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(str(directory / "model.model"))


def of_sentencepiece(found: sentencepiece.SentencePieceProcessor) -> Vocabulary:
    ids = range(found.vocab_size())

    def kind(token: int) -> int:
        if found.is_unknown(token):
            return 2
        return 3 if found.is_control(token) else 6 if found.is_byte(token) else 1

    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tuple(found.id_to_piece(one) for one in ids),
        types=tuple(kind(one) for one in ids),
        scores=tuple(found.get_score(one) for one in ids),
        special=(("bos_token_id", 1), ("eos_token_id", 2), ("unknown_token_id", 0)),
    )


def test_sentencepiece_ids_are_those_of_the_library(
    trained: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    got = made(of_sentencepiece(trained), tmp_path)
    for text in texts():
        if text and not any(mark in text for mark in ("<s>", "</s>", "▁")):
            assert got.encode(text).ids == [1, *trained.encode(text)], repr(text)
            assert got.decode(got.encode(text).ids) == text
    assert longest_token(tmp_path / "made.json") > 0


def test_scores_order_the_merges_and_not_ids(trained: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    own, rng = of_sentencepiece(trained), random.Random(0)
    order = [*range(3), *rng.sample(range(3, len(own.tokens)), len(own.tokens) - 3)]
    mixed = dataclasses.replace(
        own,
        tokens=tuple(own.tokens[i] for i in order),
        types=tuple(own.types[i] for i in order),
        scores=tuple(own.scores[i] for i in order),
    )
    got = made(mixed, tmp_path)
    for text in texts():
        if text and not any(mark in text for mark in ("<s>", "</s>", "▁")):
            found = got.encode(text, add_special_tokens=False).tokens
            assert found == [trained.id_to_piece(one) for one in trained.encode(text)]


def test_a_vocabulary_without_a_space_before_text(
    trained: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    """As Gemma's, with spaces among the tokens that are found before the text is split."""
    own = of_sentencepiece(trained)
    own = dataclasses.replace(
        own,
        tokens=(*own.tokens, "  ", "    ", "<|user|>"),
        types=(*own.types, 4, 4, 4),
        scores=(*own.scores, -1000.0, -1000.0, -1000.0),
        special=(*own.special, ("add_space_prefix", False), ("add_eos_token", True)),
    )
    got, size = made(own, tmp_path), len(own.tokens)
    assert got.encode("a", add_special_tokens=False).ids == [trained.piece_to_id("a")]
    assert got.encode("").ids == [1, 2]
    found = got.encode("<s>      a<|user|>", add_special_tokens=False).ids
    assert found == [1, size - 2, size - 3, trained.piece_to_id("a"), size - 1]
    for text in texts():
        if not any(mark in text for mark in ("<s>", "</s>", "▁")):
            assert got.decode(got.encode(text).ids) == text
