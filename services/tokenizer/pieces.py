"""The exact bytes of each token, as clients get them: a token can be half a code point, so text cannot say it.

Derived from what tokenizer.json says of its decoder: byte-level BPE spells bytes as printable characters (GPT-2's
table), others write a space as ▁ and, with byte fallback, odd bytes as <0xE2>. Added tokens stand for themselves.
"""

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """A table id → bytes for the whole vocabulary; ids without a token are empty.

    Attributes:
        is_byte_level, has_fallback: how the tokenizer spells bytes.
        special_ids: ids that are left out of text.
        byte_ids: ids of the byte-fallback tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        decoder = json.dumps(spec.get("decoder"))
        self.is_byte_level = '"ByteLevel"' in decoder
        self.has_fallback = '"ByteFallback"' in decoder
        added = {token["id"]: token["content"] for token in spec.get("added_tokens", [])}
        self.special_ids = frozenset(token["id"] for token in spec.get("added_tokens", []) if token["special"])
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._table = [b""] * (max(vocab.values(), default=-1) + 1)
        byte_of = byte_table()
        fallbacks = vocab.items() if self.has_fallback else ()
        self.byte_ids = frozenset(index for token, index in fallbacks if _FALLBACK.fullmatch(token))
        for token, index in vocab.items():
            if index in added:
                self._table[index] = added[index].encode()
            elif self.is_byte_level:
                self._table[index] = spelled_bytes(token, byte_of)
            else:
                self._table[index] = plain_bytes(token, self.has_fallback)

    def __call__(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Bytes of each id."""
        table, size = self._table, len(self._table)
        return tuple([table[index] if index < size else b"" for index in ids])


def byte_table() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, from character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def spelled_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """Bytes of a byte-level token; one with a character outside the spelling stands for itself, as in the library."""
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        return token.encode()


def plain_bytes(token: str, has_fallback: bool) -> bytes:
    """Bytes of a Metaspace, Unigram or plain token."""
    match = _FALLBACK.fullmatch(token) if has_fallback else None
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace("\u2581", " ").encode()
