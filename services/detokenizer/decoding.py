"""Incremental decoding: what each token adds to the text, so that the pieces together are the whole decoding.

`tokenizers`' DecodeStream does it where it is sound. Measured with 0.23.3 on random ids: byte-level and Unigram
tokenizers agree with whole decoding; with byte fallback it raises or differs on most, because a run of byte tokens
that is no valid UTF-8 is replaced as a whole; and while text ends in a broken character it decodes all of it again at
every token (2 s for 4,000 broken ones). Hence the two other decodings. Knows no stop strings.
"""

import codecs
from typing import Protocol

from tokenizers.decoders import DecodeStream

from services.tokenizer.encoding import TextEncoder

MAX_PENDING = 64  # tokens held by DecodeStream before bytes are decoded directly


class Decoding(Protocol):
    """Tokens in, text out as it becomes certain."""

    def step(self, token: int) -> str:
        """Text that `token` makes certain."""

    def flush(self) -> str:
        """No more tokens come: the rest, broken characters as U+FFFD."""


def make_decoding(encoder: TextEncoder, skip_special_tokens: bool) -> Decoding:
    """The decoding that is exact for this tokenizer."""
    if encoder.pieces.has_fallback:
        return RunDecoding(encoder, skip_special_tokens)
    return StreamDecoding(encoder, skip_special_tokens)


class StreamDecoding:
    """DecodeStream, and the tokens that it holds back."""

    def __init__(self, encoder: TextEncoder, skip_special_tokens: bool) -> None:
        self._encoder = encoder
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._anchor: list[int] = []  # the last token whose text is out
        self._pending: list[int] = []
        self._bytes: ByteDecoding | None = None

    def step(self, token: int) -> str:
        if self._bytes is not None:
            return self._bytes.step(token)
        self._pending.append(token)
        text: str | None = self._stream.step(self._encoder.tokenizer, token)
        if text:
            self._anchor, self._pending = [token], []
            return text
        if len(self._pending) > MAX_PENDING and self._encoder.pieces.is_byte_level:
            self._bytes = ByteDecoding(self._encoder, self._skip)
            return "".join(map(self._bytes.step, self._pending))
        return ""

    def flush(self) -> str:
        if self._bytes is not None:
            return self._bytes.flush()
        return after(self._encoder, self._anchor, self._pending, self._skip)


class ByteDecoding:
    """Byte-level tokens as the bytes they are; takes over where DecodeStream would decode garbage again and again."""

    def __init__(self, encoder: TextEncoder, skip_special_tokens: bool) -> None:
        self._pieces = encoder.pieces
        self._left_out = encoder.pieces.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        return "" if token in self._left_out else self._decoder.decode(self._pieces((token,))[0])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class RunDecoding:
    """Tokens with byte fallback: a run of byte tokens is decoded when it is over, every other token at once."""

    def __init__(self, encoder: TextEncoder, skip_special_tokens: bool) -> None:
        self._encoder = encoder
        self._left_out = encoder.pieces.special_ids if skip_special_tokens else frozenset()
        self._anchor: list[int] = []
        self._run: list[int] = []

    def step(self, token: int) -> str:
        if token in self._left_out:
            return ""
        if token in self._encoder.pieces.byte_ids:
            self._run.append(token)
            return ""
        text = self.flush() + after(self._encoder, self._anchor, [token], skip=False)
        self._anchor = [token]
        return text

    def flush(self) -> str:
        if not self._run:
            return ""
        text = after(self._encoder, self._anchor, self._run, skip=False)
        self._anchor, self._run = self._run[-1:], []
        return text


def after(encoder: TextEncoder, anchor: list[int], ids: list[int], skip: bool) -> str:
    """What `ids` add to the text behind the token `anchor`: a first token's leading space depends on it."""
    if not ids:
        return ""
    before = encoder.tokenizer.decode(anchor, skip_special_tokens=skip) if anchor else ""
    whole: str = encoder.tokenizer.decode(anchor + ids, skip_special_tokens=skip)
    return whole[len(before) :]
