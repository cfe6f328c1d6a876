"""The text of one output as its tokens come: decoding, then stop strings. Pure: no socket, no clock.

Without a stop match the emitted pieces together are `tokenizer.decode` of all ids. Text that may become a stop string,
or half a character, is held back.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.detokenizer.decoding import make_decoding
from services.detokenizer.stops import StopMatcher
from services.tokenizer.encoding import TextEncoder


class TextDelta(NamedTuple):
    """Text that became certain, and how many of the pushed tokens count (all, unless a stop string ended it)."""

    text: str
    num_consumed: int


class OutputText:
    """Push tokens, get text; `stopped` is the stop string that ended the output, if one did."""

    def __init__(
        self,
        encoder: TextEncoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prefix: Sequence[int] = (),
    ) -> None:
        """`prefix`: ids whose text was emitted elsewhere; the state goes on behind them."""
        self.stopped: str | None = None
        self._decoding = make_decoding(encoder, skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop)
        self.push(prefix)

    def push(self, ids: Sequence[int]) -> TextDelta:
        """The next tokens."""
        emitted = ""
        for consumed, token in enumerate(ids, 1):
            emitted += self._feed(self._decoding.step(token))
            if self.stopped is not None:
                return TextDelta(emitted, consumed)
        return TextDelta(emitted, len(ids))

    def finish(self) -> str:
        """No more tokens come: what was held back. It may complete a stop string after all."""
        emitted = self._feed(self._decoding.flush())
        return emitted if self.stopped is not None else emitted + self._matcher.flush()

    def _feed(self, text: str) -> str:
        emitted, self.stopped = self._matcher.feed(text)
        return emitted
