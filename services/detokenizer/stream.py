"""Turns the tokens of one output into text: decoding, then stop strings. Pure: no I/O, no clock.

Without a stop match the emitted text equals `tokenizer.decode` of all ids. Held back are: text that may become a stop
string, half a character, and a run of byte-fallback tokens (one bad byte changes all of the run). Uses the bytes of
each token and not `tokenizers`' DecodeStream: its version 0.23.3 raised on 1,160 of 2,000 random sequences with byte
fallback, and while nothing is emitted it decodes everything again at each token.
"""

import codecs
import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice_server.services.detokenizer.stops import StopMatcher
from sluice_server.services.tokenizer.encoding import TextEncoder


class TextDelta(NamedTuple):
    """Text that became certain, and the number of tokens that were used: all, unless a stop string ended the output."""

    text: str
    num_consumed: int


class OutputText:
    """The text of one output; `stopped` is the stop string that ended it, if any."""

    def __init__(
        self,
        encoder: TextEncoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`marks`: special tokens that leave a character in the text although they are skipped. It is no part of the
        text for stop strings."""
        self._pieces = encoder.pieces
        self._left_out = encoder.pieces.special_ids if skip_special_tokens else frozenset()
        self._marks = marks or {}
        self._sink = _Sink(StopMatcher(stops, include_stop), encoder.pieces.lead)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: _Run | None = None
        self._first = encoder.pieces.first_differs
        self._ended = False
        # True if the next token's text depends on its place: after half a character, in a run, or at the start.
        self._depends = self._first
        self._whole_texts = encoder.pieces.whole_texts

    @property
    def stopped(self) -> str | None:
        """The stop string that was matched, or None."""
        return self._sink.stopped

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Decodes the next tokens. After a stop string or `finish` it consumes none."""
        if self._ended or self.stopped is not None:
            return TextDelta("", 0)
        emitted: list[str] = []
        for consumed, token in enumerate(ids, 1):
            emitted.append(self._step(token))
            if self.stopped is not None:
                return TextDelta("".join(emitted), consumed)
        return TextDelta("".join(emitted), len(ids))

    def push_one(self, token: int) -> str:
        """Decodes one token: the most frequent case, without lists and tuples."""
        return "" if self._ended or self._sink.stopped is not None else self._step(token)

    def finish(self) -> str:
        """Returns the text that was held back, after the last token. It may complete a stop string."""
        if self._ended or self.stopped is not None:
            return ""
        self._ended = True
        emitted = self._end_run() + self._sink.feed(self._utf8.decode(b"", final=True))
        return emitted if self.stopped is not None else emitted + self._sink.flush()

    def _step(self, token: int) -> str:
        if token in self._left_out:
            return self._mark(self._marks[token]) if token in self._marks else ""
        text = None if self._depends else self._whole_texts[token]
        return self._decode(token) if text is None else self._sink.feed(text)

    def _mark(self, sign: str) -> str:
        """Returns the text that was held back, and the sign: nothing goes on over a mark."""
        before = self._end_run() + self._sink.feed(self._utf8.decode(b"", final=True))
        self._depends = self._first
        return before if self._sink.stopped is not None else before + self._sink.flush() + sign

    def _decode(self, token: int) -> str:
        """Decodes a token whose text depends on more than its own bytes."""
        piece = self._pieces.get(token)
        if piece is None:
            return ""
        first, self._first = self._first, False
        if self._pieces.is_byte_level:
            text = self._utf8.decode(piece)
            self._depends = self._utf8.getstate() != (b"", 0)
            return self._sink.feed(text)
        if token in self._pieces.byte_ids:
            self._run = self._run or _Run(self._sink)
            self._depends = True
            return self._run.step(piece)
        self._depends = False
        return self._end_run() + self._sink.feed(self._pieces.first(token) if first else piece.decode())

    def _end_run(self) -> str:
        run, self._run = self._run, None
        return "" if run is None else run.end()


class _Sink:
    """Drops `lead` at the start of the text, then matches stop strings. Emits nothing after a stop."""

    def __init__(self, matcher: StopMatcher, lead: tuple[str, int]) -> None:
        self.stopped: str | None = None
        self._matcher = matcher
        self._lead, self._num_lead = lead
        self._is_open = matcher.is_empty and not self._num_lead  # text passes unchanged

    def fork(self) -> "_Sink":
        """Returns a copy of the state, for a trial."""
        other = copy.copy(self)
        other._matcher = copy.copy(self._matcher)  # shares its tables, copies its two state values
        return other

    def feed(self, text: str) -> str:
        """Returns the text that can be emitted."""
        if self._is_open:
            return text
        if self.stopped is not None:
            return ""
        while self._num_lead and text:
            led = text.startswith(self._lead)
            self._num_lead = self._num_lead - 1 if led else 0
            text = text[1:] if led else text
            self._is_open = self._matcher.is_empty and not self._num_lead
        emitted, self.stopped = self._matcher.feed(text)
        return emitted

    def flush(self) -> str:
        return self._matcher.flush()


class _Run:
    """A run of byte-fallback tokens: the characters that they spell, or one U+FFFD for each if they are not all UTF-8.

    Its text is certain only at its end, but a stop string in it counts at once, because newlines are such tokens.
    """

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._trial = sink.fork()
        self._strict = codecs.getincrementaldecoder("utf-8")("strict")
        self._text: list[str] = []
        self._num = 0
        self._broken = False

    def step(self, byte: bytes) -> str:
        self._num += 1
        if self._broken:
            return self._sink.feed("\ufffd")
        try:
            text = self._strict.decode(byte)
        except UnicodeDecodeError:
            return self._break()
        self._text.append(text)
        self._trial.feed(text)
        return "" if self._trial.stopped is None else self._sink.feed("".join(self._text))

    def end(self) -> str:
        """Ends the run; returns its text without what was emitted before."""
        if self._broken:
            return ""
        is_whole = self._strict.getstate() == (b"", 0)
        return self._sink.feed("".join(self._text)) if is_whole else self._break()

    def _break(self) -> str:
        self._broken = True
        self._text.clear()
        return self._sink.feed("\ufffd" * self._num)
