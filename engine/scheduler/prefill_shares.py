"""How the tokens of a step are shared among prompts. Pure: sizes in, shares out.

Prompts that end within the step go first, so that a short one never waits for long ones. What is longer than that
shares the rest in turns. While both are there, every other step is for the ends alone: a first token then costs one
small step, not one filled up with somebody else's chunk; and the long ones are never starved, as the steps between
keep half of the budget for them.
"""

from sluice_server.engine.scheduler.sequence import Sequence

QUANTUM = 32  # tokens of a long prompt's turn at least: below, a step's fixed cost is most of it

Share = tuple[Sequence, int]


class PrefillRoundRobin:
    """Remembers whose turn it was."""

    def __init__(self) -> None:
        self._was_express = False

    def share(self, sequences: list[Sequence], budget: int) -> list[Share]:
        """(sequence, tokens) within `budget`; `sequences`, in the order of the policy, each miss some."""
        long = [one for one in sequences if one.num_missing > budget]
        self._was_express = bool(long) and len(long) < len(sequences) and not self._was_express
        if not long:
            return _ends(sequences, budget)
        reserved = 0 if self._was_express else budget - budget // 2
        ends = _ends([one for one in sequences if one.num_missing <= budget], budget - reserved)
        if self._was_express and ends:
            return ends
        return ends + _by_turns(long, budget - sum(num for _, num in ends))


def _ends(sequences: list[Sequence], budget: int) -> list[Share]:
    """Whole, one after the other; the first that does not fit gets what is left."""
    shares: list[Share] = []
    for sequence in sequences:
        num = min(sequence.num_missing, budget)
        if num == 0:
            break
        shares.append((sequence, num))
        budget -= num
    return shares


def _by_turns(sequences: list[Sequence], budget: int) -> list[Share]:
    """Equal parts, but no less than a quantum; who was served longest ago goes first."""
    shares: list[Share] = []
    turn = sorted(sequences, key=lambda sequence: sequence.last_step)
    for i, sequence in enumerate(turn):
        num = min(sequence.num_missing, max(-(-budget // (len(turn) - i)), min(QUANTUM, budget)))
        if num == 0:
            break
        shares.append((sequence, num))
        budget -= num
    return shares
