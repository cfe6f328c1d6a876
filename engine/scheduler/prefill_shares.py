"""Shares the prompt tokens of a step among prompts. Pure: sizes in, shares out.

Prompts that are pooled may have a share of their own, so that a flood of them slows down no sequence that decodes, and
so may those of resumed requests: an engine that takes over what another one had gets many of them at once.

Prompts that end within the step go first, so that a short one never waits for long ones. Longer prompts share the rest
by round robin. While there are both, every other step serves the ending prompts only: a first token then costs one
small step, without a chunk of another prompt. The steps between keep half of the budget for the long prompts, so they
do not starve.
"""

from sluice_server.engine.scheduler.sequence import Sequence

LEAST_RESUMED = 4  # a quarter of a step is for prompts of resumed requests, if there are any
QUANTUM = 32  # tokens of a long prompt per step at least: below, the fixed cost of a step dominates

Share = tuple[Sequence, int]


class PrefillRoundRobin:
    """Alternates between steps for ending prompts only and steps for all."""

    def __init__(self) -> None:
        self._was_express = False

    def share(self, sequences: list[Sequence], budget: int) -> list[Share]:
        """Returns (sequence, tokens) within `budget`. `sequences`: in the policy's order, all with missing tokens."""
        long = [one for one in sequences if one.num_missing > budget]
        self._was_express = bool(long) and len(long) < len(sequences) and not self._was_express
        if not long:
            return _ends(sequences, budget)
        reserved = 0 if self._was_express else budget - budget // 2
        ends = _ends([one for one in sequences if one.num_missing <= budget], budget - reserved)
        if self._was_express and ends:
            return ends
        return ends + _by_turns(long, budget - sum(num for _, num in ends))

    def share_beside(
        self, sequences: list[Sequence], budget: int, num_decodes: int, most_pooled: int = 0
    ) -> list[Share]:
        """Returns the same for a step that also decodes, with `most_pooled` tokens of pooled prompts at most, unless it
        is 0, and with a limit on those of resumed requests. Both go first and in order, but with no more than half of
        the budget while there are others: no kind starves."""
        pooled = [one for one in sequences if one.is_pooled] if most_pooled else []
        resumed = [one for one in sequences if one.is_resumed]
        others = [one for one in sequences if not one.is_resumed and not (most_pooled and one.is_pooled)]
        shares: list[Share] = []
        for limited, most, has_more in (
            (pooled, most_pooled, bool(resumed or others)),
            (resumed, _most_resumed(len(resumed), num_decodes, budget), bool(others)),
        ):
            given = _ends(limited, min(most, -(-budget // 2) if has_more else budget))
            shares += given
            budget -= sum(num for _, num in given)
        return shares + self.share(others, budget) if others and budget else shares


def _most_resumed(num: int, num_decodes: int, budget: int) -> int:
    """Returns how many tokens of `num` resumed requests are computed beside sequences that decode: the share that they
    are of both, so that few wait little and many are not kept for long, and a quarter at least."""
    return max(-(-budget // LEAST_RESUMED), budget * num // max(1, num + num_decodes))


def _ends(sequences: list[Sequence], budget: int) -> list[Share]:
    """Returns whole prompts in order; the first that does not fit gets the rest."""
    shares: list[Share] = []
    for sequence in sequences:
        num = min(sequence.num_missing, budget)
        if num == 0:
            break
        shares.append((sequence, num))
        budget -= num
    return shares


def _by_turns(sequences: list[Sequence], budget: int) -> list[Share]:
    """Returns equal parts of at least a quantum each; the prompt served longest ago goes first."""
    shares: list[Share] = []
    turn = sorted(sequences, key=lambda sequence: sequence.last_step)
    for i, sequence in enumerate(turn):
        num = min(sequence.num_missing, max(-(-budget // (len(turn) - i)), min(QUANTUM, budget)))
        if num == 0:
            break
        shares.append((sequence, num))
        budget -= num
    return shares
