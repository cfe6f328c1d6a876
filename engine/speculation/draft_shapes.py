"""The forms that drafts may take: how long they are for a sequence whose drafts are right so often, and how wide.

A draft's j-th token is kept with chance a^j, a being that share, and a sequence is drafted for as long as this is at
least a floor. So long drafts go to those who repeat themselves, none to those who do not. A few floors, and the widths
that there are, make all forms; the first drafts nothing. Numbers in, numbers out: knows no cost.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sluice_server.engine.request import MAX_DRAFT_TOKENS

FLOORS = (2.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08, 0.03)  # no chance reaches the first
LEVELS = 32  # of acceptance that are told apart
Present: TypeAlias = tuple[int, float, float]  # level; drafts that will be had; what is unread, see `present`


class ExpectedGain(NamedTuple):
    """What a form would make of sequences, in one step.

    Attributes:
        num_drafts: in all, as far as they will be had.
        num_gained: of these, expected to be kept.
        longest: drafts one behind the other.
        due: tokens to be read, of sequences that are drafted for, in equal parts over all steps that they have left.
    """

    num_drafts: float
    num_gained: float
    longest: int
    due: float


@dataclasses.dataclass(frozen=True, slots=True)
class DraftShape:
    """One of them.

    Attributes:
        width: drafts that follow the same token.
        lengths: by level, drafts one behind the other.
        worth: by level, how many of these are expected to be kept.
        misses: by level, the chance that one of them is wrong.
    """

    width: int
    lengths: list[int]
    worth: list[float]
    misses: list[float]

    @classmethod
    def of(cls, floor: float, width: int, max_length: int) -> "DraftShape":
        """With drafts of `max_length` tokens at most, all branches together."""
        chances = [(level + 0.5) / LEVELS for level in range(LEVELS)]
        lengths = [_length(floor, chance, max_length // width) for chance in chances]
        worth = [_worth(*pair) for pair in zip(chances, lengths, strict=True)]
        return cls(width, lengths, worth, [1 - one**num for one, num in zip(chances, lengths, strict=True)])

    def promise(self, present: Sequence[Present], rescue: float) -> ExpectedGain:
        """`rescue`: the chance that one of the alternatives takes the place of a wrong draft."""
        num_drafts, num_gained, longest, due = 0.0, 0.0, 0, 0.0
        for level, num, unread in present:
            length = self.lengths[level]
            if length:
                worth = self.worth[level] + (rescue * self.misses[level] if self.width > 1 else 0.0)
                num_drafts += length * num
                num_gained += worth * num
                longest = max(longest, length)
                due += unread * (1 + worth)  # the more a step brings, the fewer there are to bear it
        return ExpectedGain(num_drafts * self.width, num_gained, longest, due)


def forms_of(max_length: int, max_width: int) -> list[DraftShape]:
    """All of them, chains first."""
    forms = [DraftShape.of(floor, 1, max_length) for floor in FLOORS]
    width = min(max_length, max_width)
    return forms + [DraftShape.of(floor, width, max_length) for floor in FLOORS[1:] if width > 1]


def level_of(acceptance: float) -> int:
    """Of a share of drafts that are right."""
    return min(LEVELS - 1, int(acceptance * LEVELS))


def present(levels: Sequence[int], shares: Sequence[float], unread: Sequence[float]) -> list[Present]:
    """Sequences at these levels, by level.

    Args:
        shares: of each, how often there will be a draft.
        unread: of each, tokens to be read before it is drafted for, per token still to come; none where nothing is
            said.
    """
    counts, unread_at = [0.0] * LEVELS, [0.0] * LEVELS
    for level, share in zip(levels, shares, strict=True):
        counts[level] += share
    for level, num in zip(levels, unread, strict=False):
        unread_at[level] += num
    return [(level, num, unread_at[level]) for level, num in enumerate(counts) if num]


def _length(floor: float, acceptance: float, most: int) -> int:
    """Tokens of a draft whose chance to be kept is at least `floor`."""
    if floor > 1:
        return 0
    return min(most, MAX_DRAFT_TOKENS, int(math.log(floor) / math.log(acceptance)))


def _worth(acceptance: float, num: int) -> float:
    """Expected drafts kept of `num`: a + a² + … + a^num."""
    return sum(acceptance**i for i in range(1, num + 1))
