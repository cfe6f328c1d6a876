"""What it costs a proposer to read a sequence before it can draft for it, learnt from measured seconds.

Reading comes once a sequence and is paid by all of its drafts. While there are drafts, what newcomers took on average
is charged to each step; while there are none, what the sequences at hand would take: the longer they have been left
unread, and the less of them is to come, the less it pays to begin. Numbers in, numbers out: no clock.
"""

AVERAGE_WEIGHT = 0.02  # of the newest step's reading
TOKEN_WEIGHT = 0.2  # of the newest measurement of a token


class PrefillCost:
    """Seconds, of one proposer."""

    def __init__(self) -> None:
        self._step_s = 0.0  # of a step that drafts, on average
        self._token_s = 0.0
        self._is_known = False  # the last

    def note(self, num_tokens: int, seconds: float, *, is_charged: bool) -> None:
        """A step has read so many tokens, none maybe, in so long; `is_charged`: it was no probe."""
        if is_charged:
            self._step_s += AVERAGE_WEIGHT * (seconds - self._step_s)
        if num_tokens:
            weight = TOKEN_WEIGHT if self._is_known else 1.0
            self._token_s += weight * (seconds / num_tokens - self._token_s)
            self._is_known = True

    def fade(self, span: float) -> None:
        """Nothing is drafted for so many choices: what newcomers took once says less and less."""
        self._step_s *= (1 - AVERAGE_WEIGHT) ** span

    def seconds(self, due: float) -> float:
        """To charge to a step; `due`: tokens of its sequences to be read first, in equal parts over all their steps."""
        return max(self._step_s, self._token_s * due)
