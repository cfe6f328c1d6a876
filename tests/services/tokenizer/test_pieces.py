"""Joined token pieces are the bytes of the text; unsupported decoders are refused."""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from sluice_server.engine.errors import ServiceError
from sluice_server.services.tokenizer.pieces import Pieces, byte_table
from tests.oracle.tokenizers import FAMILIES

REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def of(vocab: dict[str, int], decoder: decoders.Decoder | None) -> tuple[Tokenizer, Pieces]:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer, Pieces(tokenizer)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_joined_pieces_are_the_decoded_bytes_where_these_are_text(family: str, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family](tmp_path)
    pieces, rng, num_valid = Pieces(tokenizer), random.Random(7), 0
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 6))]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in text:
            num_valid += 1
            assert b"".join(pieces(ids)).decode().replace(" ", "") == text.replace(" ", "")
            assert b"".join(pieces(ids)).decode().endswith(text.lstrip(" "))
    assert num_valid > 200


def test_every_byte_has_one_spelling() -> None:
    _, pieces = of(byte_table(), decoders.ByteLevel())
    assert b"".join(pieces(list(byte_table().values()))) == bytes(byte_table().values())
    assert sorted(byte_table().values()) == list(range(256))


def test_a_byte_level_token_that_is_not_spelled_stands_for_itself() -> None:
    tokenizer, pieces = of({"Ġa": 0, "x y": 1, "你": 2}, decoders.ByteLevel())
    assert pieces((0, 1, 2, 3)) == (b" a", b"x y", "你".encode(), b"<s>")
    assert tokenizer.decode([0, 1, 2]) == " ax y你"


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]), b" a\xe2 b"),
        (decoders.Sequence([REPLACE, FALLBACK, FUSE]), b" a\xe2 b"),
        (decoders.Sequence([FALLBACK, FUSE, REPLACE]), b" a\xe2 b"),
        (decoders.Metaspace(), b" a<0xE2> b"),
        (None, " ▁a <0xE2> ▁b".encode()),
    ],
)
def test_spaces_and_fallback_bytes(decoder: decoders.Decoder | None, text: bytes) -> None:
    _, pieces = of({"▁a": 0, "<0xE2>": 1, "▁b": 2}, decoder)
    assert b"".join(pieces((0, 1, 2))) == text


def test_ids_without_a_token_are_empty() -> None:
    _, pieces = of({"a": 0, "b": 7}, None)
    assert pieces((3, 9999, -1)) == (b"", b"", b"")
    assert pieces.get(3) is None


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([FUSE, decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([FUSE, decoders.Metaspace()]),
        decoders.Sequence([FUSE, decoders.Replace("ab", "")]),  # may lie over two tokens
    ],
)
def test_a_decoder_of_another_shape_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(ServiceError, match="is not supported in this place") as caught:
        of({"a": 0}, decoder)
    assert caught.value.reason == "MODEL_INVALID"
