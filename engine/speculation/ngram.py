"""Prompt look-up: drafts what followed the longest suffix where it occurred before, in the prompt or the output.

Needs no model and no device memory. Effective for repetitive text: edited code, quotations, data.
"""

from collections.abc import Sequence

from sluice_server.engine.plan import DraftRequest
from sluice_server.kernels import ops

MIN_MATCH = 2  # tokens; a single token has too many continuations
MAX_CATCH_UP = 4096  # tokens read of one sequence per call: a long prompt must not delay a step


class NgramProposer:
    """Drafts from a suffix automaton per sequence, which is kept in the sequence's `ProposerMemory`."""

    writes_cache = False

    def __init__(self) -> None:
        self._automaton = ops.suffix_automaton()

    def propose(self, asks: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """Implements `Proposer.propose`."""
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
    """Returns `num` tokens from index `first` on. Past the end it goes on with the copy, so that a period repeats."""
    found = list(tokens[first : first + num])
    period = len(tokens) - first
    while len(found) < num:
        found.append(found[len(found) - period])
    return found
