"""Learns from measured seconds what it costs a proposer to read a sequence before it can draft for it.

A sequence is read once, and all of its drafts share that cost. While drafts are made, each step is charged the average
cost of reading new sequences. While none are made, it is charged what the present sequences would take: the more tokens
are unread and the fewer are still to come, the less it pays to begin. Pure: numbers in, numbers out, no clock.
"""

AVERAGE_WEIGHT = 0.02  # weight of the newest step's reading time
TOKEN_WEIGHT = 0.2  # weight of the newest measurement of the time per token


class PrefillCost:
    """The reading cost of one proposer, in seconds."""

    def __init__(self) -> None:
        self._step_s = 0.0  # average reading time of a step that drafts
        self._token_s = 0.0
        self._is_known = False  # whether `_token_s` has been measured

    def note(self, num_tokens: int, seconds: float, *, is_charged: bool) -> None:
        """Records that a step read `num_tokens` tokens (possibly 0). `is_charged`: the step was not a probe."""
        if is_charged:
            self._step_s += AVERAGE_WEIGHT * (seconds - self._step_s)
        if num_tokens:
            weight = TOKEN_WEIGHT if self._is_known else 1.0
            self._token_s += weight * (seconds / num_tokens - self._token_s)
            self._is_known = True

    def fade(self, span: float) -> None:
        """Decays the average after `span` choices without drafts, as it says less and less about new sequences."""
        self._step_s *= (1 - AVERAGE_WEIGHT) ** span

    def seconds(self, due: float) -> float:
        """Returns the seconds to charge to one step.

        `due`: tokens of the step's sequences that must be read first, spread evenly over the steps that these have
        left.
        """
        return max(self._step_s, self._token_s * due)
