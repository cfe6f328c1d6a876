"""Prompt look-up: what followed the longest suffix when it occurred before, in prompt or output, may follow again.

Costs no model and no memory on the device. Needs repetition: code that is edited, text that is quoted, data.
"""

from collections.abc import Sequence

from sluice_server.engine.plan import DraftRequest
from sluice_server.kernels import ops

MIN_MATCH = 2  # tokens: a single one has too many sequels
MAX_CATCH_UP = 4096  # tokens read of one sequence at one time: a long prompt must not hold up a step


class NgramProposer:
    """Keeps an automaton for each sequence, in the memory that the sequence brings."""

    writes_cache = False

    def __init__(self) -> None:
        self._automaton = ops.suffix_automaton()

    def propose(self, asks: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """See `Proposer`."""
        return [self._sequel(ask) for ask in asks]

    def _sequel(self, ask: DraftRequest) -> Sequence[int]:
        memory, tokens = ask.memory, ask.tokens
        automaton = memory.state
        if not isinstance(automaton, self._automaton):
            automaton = memory.state = self._automaton()
        first = automaton.num_tokens
        automaton.extend(tokens, MAX_CATCH_UP)
        memory.num_read, memory.num_unread = automaton.num_tokens - first, len(tokens) - automaton.num_tokens
        if memory.num_unread or automaton.match_len < MIN_MATCH:
            return ()
        return _copied(tokens, automaton.match_end, ask.num)


def _copied(tokens: Sequence[int], first: int, num: int) -> Sequence[int]:
    """`num` tokens from `first` on; what is copied goes on behind the last, so that a period goes round."""
    found = list(tokens[first : first + num])
    period = len(tokens) - first
    while len(found) < num:
        found.append(found[len(found) - period])
    return found
