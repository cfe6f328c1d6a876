"""Computes the bytes that each token adds to the text, and how those bytes become text.

Reads the decoder that tokenizer.json describes. Byte-level BPE spells bytes as printable characters (GPT-2's table);
other decoders write a space as ▁ and, with byte fallback, single bytes as <0xE2>. Clients get bytes because a token can
be half a code point. A decoder of another shape is rejected at start, because a wrong guess would corrupt every answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from sluice_server.engine.errors import Code, ServiceError

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNSPELLABLE = 0x10FFFF  # a code point outside latin-1: marks characters that spell no byte


class Pieces:
    """A table from id to bytes for the whole vocabulary and added tokens; ids without a token are empty.

    Attributes:
        is_byte_level: the text is all pieces joined, then decoded as UTF-8.
        has_fallback: some tokens are single bytes, spelled <0xE2>.
        byte_ids: ids of byte-fallback tokens; a run of them that is not UTF-8 becomes one U+FFFD for each.
        special_ids: ids of special tokens, which can be left out of the text.
        whole_texts: id → text of a token that is whole characters by itself; None for others. Filled on first use.
        lead: (character, number): at most that many of the character are dropped at the start of a text.
        first_differs: the first token of a text may lose its ▁; see `first`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ServiceError MODEL_INVALID for a decoder that is not supported."""
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        shape = _Shape(None if decoder is None else json.loads(decoder.__getstate__()))
        self.is_byte_level = shape.is_byte_level
        self.has_fallback = shape.has_fallback
        self.lead = shape.lead
        self.first_differs = shape.first_differs
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        fallbacks = vocab.items() if shape.has_fallback else ()
        self.byte_ids = frozenset(index for token, index in fallbacks if _FALLBACK.fullmatch(token))
        self._table: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, index in vocab.items():
            self._table[index] = shape.piece(token)
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self)

    def __call__(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Returns the bytes of each id."""
        return tuple([self.get(index) or b"" for index in ids])

    def get(self, index: int) -> bytes | None:
        """Returns the bytes of one id; None for an id without a token, which decoding skips."""
        return self._table[index] if 0 <= index < len(self._table) else None

    def first(self, index: int) -> str:
        """Returns the text of a token at the start of a text; used where `first_differs`."""
        text: str = self._tokenizer.decode([index], skip_special_tokens=False)
        return text


class _WholeTexts(dict[int, str | None]):
    """A dict that computes missing entries; a dict because each generated token is looked up here."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, index: int) -> str | None:
        piece = None if index in self._pieces.byte_ids else self._pieces.get(index)
        try:
            self[index] = None if piece is None else piece.decode()
        except UnicodeDecodeError:
            self[index] = None
        return self[index]


class _Shape:
    """The parsed description of a decoder.

    Metaspace, Replace and ByteFallback work on each token, then Fuse and Strip on the whole text. The order of the
    first three matters only for bytes that spell a ▁.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.is_byte_level = False
        self.has_fallback = False
        self.first_differs = False
        self.lead = ("", 0)
        self._replaced: list[tuple[str, str]] = []
        self._prefix = ""
        self._spelling = _spelling()
        if decoder is None:  # without a decoder tokens are words, joined by spaces
            self._prefix, self.lead = " ", (" ", 1)
            return
        fused = False
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            self._take(step, fused)
            fused = fused or step["type"] in ("Fuse", "ByteLevel")

    def piece(self, token: str) -> bytes:
        """Returns the bytes that a token adds to the text, except at the start of the text."""
        for old, new in self._replaced:
            token = token.replace(old, new)
        if self.is_byte_level:
            try:
                return token.translate(self._spelling).encode("latin-1")
            except UnicodeEncodeError:  # not in the spelling: the token is its own text, as in the library
                return token.encode()
        match = _FALLBACK.fullmatch(token) if self.has_fallback else None
        return bytes([int(match.group(1), 16)]) if match else (self._prefix + token).encode()

    def _take(self, step: dict[str, Any], fused: bool) -> None:
        match step:
            case {"type": "ByteLevel"} if not fused and not self.has_fallback:
                self.is_byte_level = True
            case {"type": "ByteFallback"} if not fused:
                self.has_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if fused:
                self.lead = (char, start)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not fused or len(old) == 1
            ):
                self._replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                self._replaced.append((old, " "))
                self.first_differs = True
            case _:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "MODEL_INVALID",
                    f"tokenizer.json: decoder {step.get('type')} is not supported in this place; supported are "
                    "ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order",
                )


def byte_table() -> dict[str, int]:
    """Returns GPT-2's spelling of bytes as printable characters, from character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _spelling() -> dict[int, int]:
    """Returns a table for str.translate: from a spelled character to its byte as a code point.

    All other code points below 256 map to one that latin-1 cannot encode.
    """
    unspelled = dict.fromkeys(range(256), _UNSPELLABLE)
    return unspelled | {ord(char): byte for char, byte in byte_table().items()}
