"""The forms that drafts may take: draft length by acceptance rate, and width.

With acceptance rate a, a draft's j-th token is kept with probability a^j. A sequence is drafted for as long as this is
at least a threshold. So repetitive sequences get long drafts and others get none. A few thresholds and the available
widths make all forms; the first form drafts nothing. Pure: numbers in, numbers out; costs are in `costs` and
`prefill_cost`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sluice_server.engine.request import MAX_DRAFT_TOKENS

FLOORS = (2.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08, 0.03)  # the first exceeds every probability: no drafts
LEVELS = 32  # number of levels into which acceptance rates are divided
Present: TypeAlias = tuple[int, float, float]  # level; sum of shares; sum of unread, see `present`


class ExpectedGain(NamedTuple):
    """The expected effect of a form on the sequences of one step.

    Attributes:
        num_drafts: all drafts that will be found.
        num_gained: drafts that are expected to be kept.
        longest: depth of the deepest draft.
        due: tokens to be read of sequences that are drafted for, spread evenly over all steps that they have left.
    """

    num_drafts: float
    num_gained: float
    longest: int
    due: float


@dataclasses.dataclass(frozen=True, slots=True)
class DraftShape:
    """One form of drafts.

    Attributes:
        width: drafts that follow the same token.
        lengths: by level, the depth of the draft.
        worth: by level, the expected number of kept drafts.
        misses: by level, the probability that at least one draft is wrong.
    """

    width: int
    lengths: list[int]
    worth: list[float]
    misses: list[float]

    @classmethod
    def of(cls, floor: float, width: int, max_length: int) -> "DraftShape":
        """Returns the form with this threshold and width, at most `max_length` draft tokens over all branches."""
        chances = [(level + 0.5) / LEVELS for level in range(LEVELS)]
        lengths = [_length(floor, chance, max_length // width) for chance in chances]
        worth = [_worth(*pair) for pair in zip(chances, lengths, strict=True)]
        return cls(width, lengths, worth, [1 - one**num for one, num in zip(chances, lengths, strict=True)])

    def promise(self, present: Sequence[Present], rescue: float) -> ExpectedGain:
        """Returns the expected gain; `rescue` is the probability that an alternative replaces a wrong draft."""
        num_drafts, num_gained, longest, due = 0.0, 0.0, 0, 0.0
        for level, num, unread in present:
            length = self.lengths[level]
            if length:
                worth = self.worth[level] + (rescue * self.misses[level] if self.width > 1 else 0.0)
                num_drafts += length * num
                num_gained += worth * num
                longest = max(longest, length)
                due += unread * (1 + worth)  # the more tokens a step yields, the fewer steps share the cost
        return ExpectedGain(num_drafts * self.width, num_gained, longest, due)


def forms_of(max_length: int, max_width: int) -> list[DraftShape]:
    """Returns all forms, chains first."""
    forms = [DraftShape.of(floor, 1, max_length) for floor in FLOORS]
    width = min(max_length, max_width)
    return forms + [DraftShape.of(floor, width, max_length) for floor in FLOORS[1:] if width > 1]


def level_of(acceptance: float) -> int:
    """Returns the level of an acceptance rate."""
    return min(LEVELS - 1, int(acceptance * LEVELS))


def present(levels: Sequence[int], shares: Sequence[float], unread: Sequence[float]) -> list[Present]:
    """Returns the sequences, grouped by level.

    Args:
        shares: per sequence, how often a draft will be found.
        unread: per sequence, tokens to be read before it is drafted for, per token still to come; empty if nothing is
            unread.
    """
    counts, unread_at = [0.0] * LEVELS, [0.0] * LEVELS
    for level, share in zip(levels, shares, strict=True):
        counts[level] += share
    for level, num in zip(levels, unread, strict=False):
        unread_at[level] += num
    return [(level, num, unread_at[level]) for level, num in enumerate(counts) if num]


def _length(floor: float, acceptance: float, most: int) -> int:
    """Returns the largest draft length whose probability to be kept is at least `floor`."""
    if floor > 1:
        return 0
    return min(most, MAX_DRAFT_TOKENS, int(math.log(floor) / math.log(acceptance)))


def _worth(acceptance: float, num: int) -> float:
    """Returns the expected number of kept drafts of `num`: a + a² + … + a^num."""
    return sum(acceptance**i for i in range(1, num + 1))
