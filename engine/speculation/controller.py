"""How many tokens to draft for each sequence, each step: as many as measured costs and acceptance make worth it.

A draft's j-th token is kept with chance a^j, a being the share of its sequence's drafts that were right of late. A step
drafts for all as long as that chance is at least a floor; a few floors are compared by the tokens per second that they
promise, and one of them drafts nothing. Where drafts may branch, each floor is compared in both forms: as a chain, and
with alternatives to each of its tokens, one of which stands now and then when that token falls. So long drafts go to
those who repeat themselves, none to those who do not, and nobody's when the step is better spent on many rows. Pure:
seconds come in, there is no clock and no chance.
"""

import dataclasses
import math
from collections.abc import Sequence

from engine.request import MAX_DRAFT_TOKENS
from engine.speculation.costs import CostTable

FLOORS = (2.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08, 0.03)  # the first drafts nothing
LEVELS = 32  # of acceptance that are told apart
WORTH = 1.05  # drafting must promise so much more than none: planning and applying drafts is not in the seconds
GAIN = 1.05  # another floor must promise so much more than the present one
PRIOR_ACCEPTANCE = 0.6  # before anything is known
PRIOR_WEIGHT = 3.0  # drafts' worth that the average of all counts in a sequence's own
MEMORY = 0.92  # of a sequence, per verified draft: about the last ten count
COMMON_MEMORY = 0.98  # of all together
FADE = 0.9  # of a sequence that is not drafted for, per choice: it is given another chance
LOOK_EVERY = 4  # choices between two looks at the floor
PATIENCE = 8  # steps between them while nothing is drafted; doubled while that changes nothing
PATIENCE_MOST = 32
PROBE_EVERY = 32  # such steps: then one sequence is drafted for all the same; doubled while that changes nothing
PROBE_MOST = 1024
PROBE_LENGTH = 2
YIELD_WEIGHT = 0.1  # of the newest share of what was asked for that was drafted
READING_WEIGHT = 0.02  # of the newest time that reading took
PROBE_WEIGHT = 0.5  # the same of a probe
PRIOR_RESCUE = 0.3  # share of wrong drafts whose place one of the alternatives takes, before anything is known
RESCUE_WEIGHT = 0.02  # of the newest
RESCUE_FADE = 0.01  # towards the first guess, per look, while nothing branches: it is given another chance


@dataclasses.dataclass(slots=True)
class Record:
    """What became of one sequence's drafts: tokens that were right, and those that could have been; both fade."""

    right: float = 0.0
    tried: float = 0.0


class Controller:
    """Learns from every step and chooses for the next.

    Attributes:
        floor: index of the present form: of a floor and a width.
        width: of the drafts last chosen.
    """

    def __init__(self, max_length: int, max_width: int = 1) -> None:
        self.floor = 0
        self.width = 1
        self._forms = [(floor, 1) for floor in FLOORS]
        if min(max_length, max_width) > 1:
            self._forms += [(floor, min(max_length, max_width)) for floor in FLOORS[1:]]
        self._max_length = max_length
        self._steps = CostTable(from_nothing=False)
        self._drafting = {width: CostTable(from_nothing=True) for _, width in self._forms}
        self._rescue = PRIOR_RESCUE
        self._common = Record(PRIOR_ACCEPTANCE * 10, 10.0)
        self._reading_s = 0.0  # of a step, on average
        self._yield = 1.0  # of what was asked for, the share that was drafted
        chances = [(level + 0.5) / LEVELS for level in range(LEVELS)]
        self._lengths = [[_length(floor, one, max_length // width) for one in chances] for floor, width in self._forms]
        self._worth = [[_worth(*pair) for pair in zip(chances, lengths, strict=True)] for lengths in self._lengths]
        self._misses = [[1 - one**num for one, num in zip(chances, lengths, strict=True)] for lengths in self._lengths]
        self._num_choices = 0
        self._num_idle = 0
        self._patience = PATIENCE
        self._next_look = PATIENCE  # among idle steps
        self._num_probes = 0
        self._probe_every = PROBE_EVERY
        self._is_new = True  # nothing has been drafted yet

    def rests(self) -> bool:
        """Whether nobody is drafted for in the next step, whoever runs. Asked once a step, before `choose`: while
        drafts do not help, hardly a step may cost more than this."""
        if not self._is_idle:
            return False
        self._num_idle += 1
        return self._num_idle % self._probe_every > 0 and self._num_idle < self._next_look

    def choose(self, records: Sequence[Record], num_rows: int) -> list[int]:
        """Drafts for each sequence in a step of `num_rows` decoding rows, theirs among them, unless it `rests`."""
        span = 1.0  # that this choice stands for, in choices of an impatient one
        if self._is_idle:
            if self._num_idle % self._probe_every == 0:
                return self._probe(records)
            span = self._patience / PATIENCE
            self._reading_s *= (1 - READING_WEIGHT) ** span
            self._next_look = self._num_idle + self._patience
            self._patience = min(2 * self._patience, PATIENCE_MOST)
        common = self._common.right / self._common.tried
        levels = [_level(record, common) for record in records]
        self._num_choices += 1
        if self.floor == 0 or self._num_choices % LOOK_EVERY == 0:
            self._settle(levels, num_rows)
        lengths, self.width = self._lengths[self.floor], self._forms[self.floor][1]
        chosen = [lengths[level] for level in levels]
        fade = FADE**span
        for record, num in zip(records, chosen, strict=True):
            if not num:
                record.right *= fade
                record.tried *= fade
        return chosen

    def drafted(self, asked: Sequence[int], num_drafted: int, seconds: float, *, had_to_read: bool) -> None:
        """Drafting for sequences, of lengths `asked`, took so long and gave so many tokens. Some of them may have been
        read first: that comes once a sequence, and is paid by all steps."""
        self._is_new = False
        num_rows, longest = len(asked), max(asked)
        reading_s = 0.0
        if had_to_read:
            reading_s = max(0.0, seconds - self._drafting[self.width].seconds(num_rows, [longest])[0])
        else:
            self._drafting[self.width].record(num_rows, longest, seconds)
        if self.floor:
            self._reading_s += READING_WEIGHT * (reading_s - self._reading_s)
        weight = YIELD_WEIGHT if self.floor else PROBE_WEIGHT
        self._yield += weight * (num_drafted / max(1, sum(asked) * self.width) - self._yield)

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of decoding rows alone, drafts included, took so long."""
        if seconds > 0:
            self._steps.record(num_rows, num_tokens, seconds)

    def verified(self, record: Record, num: int, right: int) -> None:
        """Of `num` drafts the first `right` were kept: behind a wrong one nothing was tried."""
        for one, memory in ((record, MEMORY), (self._common, COMMON_MEMORY)):
            one.right = one.right * memory + right
            one.tried = one.tried * memory + right + (right < num)

    def branched(self, *, is_met: bool) -> None:
        """A draft was wrong that had alternatives: whether one of them was right."""
        self._rescue += RESCUE_WEIGHT * (is_met - self._rescue)

    @property
    def _is_idle(self) -> bool:
        return self.floor == 0 and not self._is_new

    def _settle(self, levels: Sequence[int], num_rows: int) -> None:
        """Keep the floor, or take one that promises clearly more."""
        if self.width == 1:
            self._rescue += RESCUE_FADE * (PRIOR_RESCUE - self._rescue)
        counts = [0] * LEVELS
        for level in levels:
            counts[level] += 1
        present = [(level, num) for level, num in enumerate(counts) if num]
        rates = self._rates(present, num_rows)
        best = max(range(len(rates)), key=lambda i: (rates[i], -i))
        if rates[best] > rates[self.floor] * GAIN:
            if self.floor == 0:
                self._probe_every, self._patience = PROBE_EVERY, PATIENCE
            self.floor = best
        if self.floor and rates[self.floor] < rates[0] * WORTH:
            self.floor, self._next_look = 0, self._num_idle + PATIENCE

    def _rates(self, present: Sequence[tuple[int, int]], num_rows: int) -> list[float]:
        """Tokens per second that each floor promises, for `present` pairs of level and sequences at it."""
        forms = list(zip(self._forms, self._lengths, self._worth, self._misses, strict=True))
        asked = [width * sum(lengths[level] * num for level, num in present) for (_, width), lengths, _, _ in forms]
        gained = [
            sum((worth[level] + (width > 1) * self._rescue * misses[level]) * num for level, num in present)
            for (_, width), _, worth, misses in forms
        ]
        longest = [max(lengths[level] for level, _ in present) for lengths in self._lengths]
        step_s = self._steps.seconds(num_rows, [num_rows + math.ceil(self._yield * num) for num in asked])
        draft_s = self._drafting_s(sum(num for _, num in present), longest)
        draft_s = [one + self._reading_s * (num > 0) for one, num in zip(draft_s, longest, strict=True)]
        return [
            (num_rows + self._yield * more) / max(step + draft, 1e-9)
            for more, step, draft in zip(gained, step_s, draft_s, strict=True)
        ]

    def _drafting_s(self, num_rows: int, longest: list[int]) -> list[float]:
        """Expected seconds of drafting in each form. Alternatives cost no less than the chain that they belong to."""
        by_width = {width: table.seconds(num_rows, longest) for width, table in self._drafting.items()}
        return [max(by_width[1][i], by_width[width][i]) for i, (_, width) in enumerate(self._forms)]

    def _probe(self, records: Sequence[Record]) -> list[int]:
        """Draft a little for one sequence, another each time."""
        self._probe_every = min(2 * self._probe_every, PROBE_MOST)
        self._num_probes += 1
        self.width = 1
        whose = self._num_probes % len(records)
        return [min(PROBE_LENGTH, self._max_length) if i == whose else 0 for i in range(len(records))]


def _level(record: Record, common: float) -> int:
    """Of a sequence's acceptance, of which that of all is a part."""
    acceptance = (record.right + PRIOR_WEIGHT * common) / (record.tried + PRIOR_WEIGHT)
    return min(LEVELS - 1, int(acceptance * LEVELS))


def _length(floor: float, acceptance: float, most: int) -> int:
    """Tokens of a draft whose chance to be kept is at least `floor`."""
    if floor > 1:
        return 0
    return min(most, MAX_DRAFT_TOKENS, int(math.log(floor) / math.log(acceptance)))


def _worth(acceptance: float, num: int) -> float:
    """Expected drafts kept of `num`: a + a² + … + a^num."""
    return sum(acceptance**i for i in range(1, num + 1))
