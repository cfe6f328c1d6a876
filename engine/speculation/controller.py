"""How many tokens to draft for each sequence, each step: as many as measured costs and acceptance make worth it.

A step drafts in one form for all, see `forms`; they are compared by the tokens per second that they promise. Where
drafts may branch, each is there twice: as a chain, and with alternatives to each of its tokens, one of which stands now
and then when that token falls. Nobody is drafted for when the step is better spent on many rows, or when reading what
there is would take longer than drafts can make good. Pure: seconds come in, there is no clock and no chance.
"""

import dataclasses
import math
from collections.abc import Sequence

from sluice_server.engine.speculation.costs import CostTable
from sluice_server.engine.speculation.draft_shapes import Present, forms_of, level_of, present
from sluice_server.engine.speculation.prefill_cost import PrefillCost

WORTH = 1.05  # drafting must promise so much more than none: planning and applying drafts is not in the seconds
GAIN = 1.05  # another floor must promise so much more than the present one
PRIOR_ACCEPTANCE = 0.6  # before anything is known
PRIOR_WEIGHT = 3.0  # drafts' worth that the average of all counts in a sequence's own
MEMORY = 0.92  # of a sequence, per verified draft: about the last ten count
COMMON_MEMORY = 0.98  # of all together
FADE = 0.9  # of a sequence that is not drafted for, per choice: it is given another chance
LOOK_EVERY = 4  # choices between two looks at the floor; doubled while that changes nothing
LOOK_MOST = 16
PATIENCE = 8  # steps between them while nothing is drafted; doubled while that changes nothing
PATIENCE_MOST = 32
PROBE_EVERY = 32  # such steps: then one sequence is drafted for all the same; doubled while that changes nothing
PROBE_MOST = 1024
PROBE_SHARE = 0.005  # of all time that probes may take: who has to read for them is probed less often still
PROBE_LEAST_OFTEN = 8192
PROBE_LENGTH = 2
STEP_WEIGHT = 0.1  # of the newest step's time
PROBE_WEIGHT = 0.5  # of a probe that found a draft, in how often there are any: those that found none weigh little
NEW_SHARE = 0.25  # of the rows: so many newcomers, of whom nothing is known, are looked at at once
PRIOR_RESCUE = 0.3  # share of wrong drafts whose place one of the alternatives takes, before anything is known
RESCUE_WEIGHT = 0.02  # of the newest
RESCUE_FADE = 0.01  # towards the first guess, per look, while nothing branches: it is given another chance


@dataclasses.dataclass(slots=True)
class AcceptanceRecord:
    """What became of one sequence's drafts: tokens that were right, and those that could have been; and of what was
    asked for, the shares that were drafted, and how many they are. All of them fade."""

    right: float = 0.0
    tried: float = 0.0
    found: float = 0.0
    asked: float = 0.0

    def fade(self, choices: float, steps: float) -> None:
        """Nothing was drafted in so many of each: what there was before says less; where texts repeat themselves
        changes with every token."""
        by = FADE**choices
        self.right *= by
        self.tried *= by
        by = FADE**steps
        self.found *= by
        self.asked *= by


class SpeculationController:
    """Learns from every step and chooses for the next.

    Attributes:
        floor: index of the present form: of a floor and a width.
        width: of the drafts last chosen.
    """

    def __init__(self, max_length: int, max_width: int = 1) -> None:
        self.floor = 0
        self.width = 1
        self._forms = forms_of(max_length, max_width)
        self._max_length = max_length
        self._steps = CostTable(from_nothing=False)
        self._drafting = {form.width: CostTable(from_nothing=True) for form in self._forms}
        self._rescue = PRIOR_RESCUE
        self._common = AcceptanceRecord(PRIOR_ACCEPTANCE * 10, 10.0, 10.0, 10.0)
        self._reading = PrefillCost()
        self._num_choices = 0
        self._look_every = LOOK_EVERY
        self._num_idle = 0
        self._patience = PATIENCE
        self._looked = 0  # when it did last, in idle steps
        self._next_look = PATIENCE  # among idle steps
        self._num_probes = 0
        self._probe_every = PROBE_EVERY
        self._next_probe = PROBE_EVERY  # among idle steps
        self._step_s = 0.0  # on average of late
        self._is_new = True  # nothing has been drafted yet
        self._num_new = 0  # sequences that have come since the last look

    def rests(self, num_steps: int = 1) -> bool:
        """Whether nobody is drafted for in the next step, whoever runs. Asked before `choose`, so many steps after it
        was asked last: while drafts do not help, hardly a step may cost more than this."""
        if not self._is_idle:
            return False
        self._num_idle += num_steps
        return self._num_idle < self._next_probe and self._num_idle < self._next_look

    def choose(
        self, records: Sequence[AcceptanceRecord], num_rows: int, unread: Sequence[float] = (), *, is_alone: bool = True
    ) -> list[int]:
        """Drafts for each sequence in a step of `num_rows` decoding rows, theirs among them, unless it `rests`.

        Args:
            unread: of each, tokens that have to be read before it is drafted for, per token still to come.
            is_alone: the step computes no prompts, and so can be measured.
        """
        if not records:
            return self._put_off()
        span = steps = 1.0  # that this choice stands for: choices of an impatient one, and steps
        if self._is_idle:
            if self._num_idle >= self._next_probe:
                return self._probe(records)
            steps = float(self._num_idle - self._looked)
            span = steps / PATIENCE
            self._looked = self._num_idle
            self._reading.fade(span)
            self._next_look = self._num_idle + self._patience
            self._patience = min(2 * self._patience, PATIENCE_MOST)
        elif self.floor and is_alone and not self._steps.is_fresh(num_rows, num_rows):
            return [0] * len(records)  # what a step without drafts takes is the measure of all others
        common = self._common.right / self._common.tried
        levels = [_level(record, common) for record in records]
        self._num_choices += 1
        if self.floor == 0 or self._num_choices >= self._look_every:
            self._num_choices = self._num_new = 0
            shares = [_share(record, self._common) for record in records]
            self._settle(present(levels, shares, unread), num_rows, len(records))
        form = self._forms[self.floor]
        self.width = form.width
        chosen = [form.lengths[level] for level in levels]
        for record, num in zip(records, chosen, strict=True):
            if not num:
                record.fade(span, steps)
        return chosen

    def joined(self, num: int, num_rows: int) -> None:
        """So many of `num_rows` sequences are new: where nothing is drafted, that may have been because of others; and
        where others were worth drafts, these would be read for them unseen."""
        self._num_new += num
        if self._num_new >= NEW_SHARE * num_rows:
            self._num_choices = self._look_every
            if self._is_idle:
                self._next_look = min(self._next_look, self._num_idle + 1)

    def answered(self, record: AcceptanceRecord, asked: int, num: int) -> None:
        """Of `asked` drafts so many were made: who looks things up finds nothing now and then."""
        for one, memory in ((record, MEMORY), (self._common, COMMON_MEMORY)):
            one.found = one.found * memory + num / asked
            one.asked = one.asked * memory + 1.0
        if self.floor == 0 and num:
            self._common.found += PROBE_WEIGHT * (self._common.asked - self._common.found)
            self._next_look = min(self._next_look, self._num_idle + 1)

    def drafted(self, asked: Sequence[int], seconds: float, *, num_read: int) -> None:
        """Drafting took so long for sequences of which lengths `asked` were wanted, behind reading `num_read` tokens of
        these or of others, which can be drafted for only later."""
        self._is_new = False
        reading_s = seconds
        if asked:
            table, size = self._drafting[self.width], (len(asked), max(asked))
            reading_s = max(0.0, seconds - table.seconds(size[0], [size[1]])[0]) if num_read else 0.0
            if not num_read:
                table.record(*size, seconds)
        self._reading.note(num_read, reading_s, is_charged=self.floor > 0)
        if self.floor == 0:
            self._pause_for(seconds)

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of decoding rows alone, drafts included, took so long."""
        if seconds > 0:
            self._steps.record(num_rows, num_tokens, seconds)
            self._step_s += STEP_WEIGHT * (seconds - self._step_s)

    def verified(self, record: AcceptanceRecord, num: int, right: int) -> None:
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

    def _settle(self, there: Sequence[Present], num_rows: int, num_asked: int) -> None:
        """Keep the floor, or take one that promises clearly more."""
        if self.width == 1:
            self._rescue += RESCUE_FADE * (PRIOR_RESCUE - self._rescue)
        rates, before = self._rates(there, num_rows, num_asked), self.floor
        best = max(range(len(rates)), key=lambda i: (rates[i], -i))
        if rates[best] > rates[self.floor] * GAIN:
            self.floor = best
        if self.floor and rates[self.floor] < rates[0] * WORTH:
            self.floor = 0
        self._look_every = LOOK_EVERY if self.floor != before else min(2 * self._look_every, LOOK_MOST)
        if self.floor and not before:
            self._probe_every, self._patience = PROBE_EVERY, PATIENCE
        if before and not self.floor:
            self._next_look, self._next_probe = self._num_idle + PATIENCE, self._num_idle + PROBE_EVERY

    def _rates(self, there: Sequence[Present], num_rows: int, num_asked: int) -> list[float]:
        """Tokens per second that each floor promises, drafts being made for `num_asked`."""
        promises = [form.promise(there, self._rescue) for form in self._forms]
        step_s = self._steps.seconds(num_rows, [num_rows + math.ceil(one.num_drafts) for one in promises])
        draft_s = self._drafting_s(num_asked, [one.longest for one in promises])
        read_s = [self._reading.seconds(one.due) if one.longest else 0.0 for one in promises]
        return [
            (num_rows + one.num_gained) / max(sum(seconds), 1e-9)
            for one, *seconds in zip(promises, step_s, draft_s, read_s, strict=True)
        ]

    def _drafting_s(self, num_rows: int, longest: list[int]) -> list[float]:
        """Expected seconds of drafting in each form. Alternatives cost no less than the chain that they belong to."""
        by_width = {width: table.seconds(num_rows, longest) for width, table in self._drafting.items()}
        return [max(by_width[1][i], by_width[form.width][i]) for i, form in enumerate(self._forms)]

    def _put_off(self) -> list[int]:
        """Nobody can be drafted for: ask again in a while, or when others come."""
        soon = self._num_idle + PATIENCE
        self._next_look, self._next_probe = max(self._next_look, soon), max(self._next_probe, soon)
        return []

    def _probe(self, records: Sequence[AcceptanceRecord]) -> list[int]:
        """Draft a little for one sequence, another each time: soon again if that one cannot be drafted for."""
        self._next_probe = self._num_idle + PROBE_EVERY
        self._num_probes += 1
        self.width = 1
        whose = self._num_probes % len(records)
        return [min(PROBE_LENGTH, self._max_length) if i == whose else 0 for i in range(len(records))]

    def _pause_for(self, seconds: float) -> None:
        """A probe took so long: the next one comes when that is a small share of the time between them."""
        least = int(seconds / (PROBE_SHARE * self._step_s)) if self._step_s else 0
        longer = max(min(2 * self._probe_every, PROBE_MOST), min(least, PROBE_LEAST_OFTEN))
        self._probe_every = max(self._probe_every, longer)
        self._next_probe = self._num_idle + self._probe_every


def _level(record: AcceptanceRecord, common: float) -> int:
    """Of a sequence's acceptance, of which that of all is a part."""
    acceptance = (record.right + PRIOR_WEIGHT * common) / (record.tried + PRIOR_WEIGHT)
    return level_of(acceptance)


def _share(record: AcceptanceRecord, common: AcceptanceRecord) -> float:
    """Of what is asked for it, that is drafted; likewise."""
    return (record.found + PRIOR_WEIGHT * common.found / common.asked) / (record.asked + PRIOR_WEIGHT)
