"""Chooses for each step how many tokens to draft for each sequence, from measured costs and acceptance rates.

All sequences of a step are drafted for in one form (see `draft_shapes`). Forms are compared by the tokens per second
that they promise. Where drafts may branch, most forms exist twice: as a chain, and with alternatives to each token, one
of which is sometimes right when that token is wrong. No drafts are made when a step is better spent on many rows, or
when the proposer would have to read more than its drafts can repay. Pure: no clock, no randomness; seconds are
arguments.
"""

import dataclasses
import math
from collections.abc import Sequence

from sluice_server.engine.speculation.costs import CostTable
from sluice_server.engine.speculation.draft_shapes import Present, forms_of, level_of, present
from sluice_server.engine.speculation.prefill_cost import PrefillCost

WORTH = 1.05  # factor by which drafting must beat no drafting: the seconds exclude planning and applying drafts
GAIN = 1.05  # factor by which another form must beat the present one
PRIOR_ACCEPTANCE = 0.6  # assumed before the first measurement
PRIOR_WEIGHT = 3.0  # weight of the average of all sequences in one sequence's rate, in drafts
MEMORY = 0.92  # decay of a sequence's counts per verification: about the last ten count
COMMON_MEMORY = 0.98  # decay of the counts over all sequences
FADE = 0.9  # decay per choice for a sequence without drafts, so that it is tried again
LOOK_EVERY = 4  # choices between two evaluations of the forms; doubled while these change nothing
LOOK_MOST = 16
PATIENCE = 8  # steps between two evaluations while nothing is drafted; doubled while these change nothing
PATIENCE_MOST = 32
PROBE_EVERY = 32  # steps without drafts before one sequence is drafted for as a probe; doubled after each probe
PROBE_MOST = 1024
PROBE_SHARE = 0.005  # share of all time for probes: a proposer that must read first is probed less often
PROBE_LEAST_OFTEN = 8192
PROBE_LENGTH = 2
STEP_WEIGHT = 0.1  # weight of the newest step's time
# Weight in the share of drafts found, of a probe that found one; other probes weigh little.
PROBE_WEIGHT = 0.5
NEW_SHARE = 0.25  # share of new rows at which the forms are evaluated at once
PRIOR_RESCUE = 0.3  # share of wrong drafts that one of their alternatives replaces; assumed before measurements
RESCUE_WEIGHT = 0.02  # weight of the newest wrong draft
RESCUE_FADE = 0.01  # step towards PRIOR_RESCUE per evaluation while nothing branches, so that trees are tried again


@dataclasses.dataclass(slots=True)
class AcceptanceRecord:
    """Running counts of one sequence's drafts; all of them decay.

    Attributes:
        right: drafts that were right.
        tried: drafts that were verified, up to and including the first wrong one.
        found: sum over requests of the drafts made, each divided by the drafts asked for.
        asked: number of requests to the proposer.
    """

    right: float = 0.0
    tried: float = 0.0
    found: float = 0.0
    asked: float = 0.0

    def fade(self, choices: float, steps: float) -> None:
        """Decays the counts after a number of choices and steps without drafts.

        Older counts say less then: where a text repeats itself changes with every token.
        """
        by = FADE**choices
        self.right *= by
        self.tried *= by
        by = FADE**steps
        self.found *= by
        self.asked *= by


class SpeculationController:
    """Learns from every step and chooses the draft lengths of the next.

    Attributes:
        floor: index of the present form (an acceptance threshold and a width).
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
        self._looked = 0  # idle step of the last evaluation
        self._next_look = PATIENCE  # among idle steps
        self._num_probes = 0
        self._probe_every = PROBE_EVERY
        self._next_probe = PROBE_EVERY  # among idle steps
        self._step_s = 0.0  # running average
        self._is_new = True  # nothing has been drafted yet
        self._num_new = 0  # sequences that joined since the last evaluation

    def rests(self, num_steps: int = 1) -> bool:
        """Returns whether the next step drafts for no sequence, whichever sequences run.

        Called before `choose`; `num_steps` is the number of steps since the last call. While drafts do not help, a step
        should cost hardly more than this call.
        """
        if not self._is_idle:
            return False
        self._num_idle += num_steps
        return self._num_idle < self._next_probe and self._num_idle < self._next_look

    def choose(
        self, records: Sequence[AcceptanceRecord], num_rows: int, unread: Sequence[float] = (), *, is_alone: bool = True
    ) -> list[int]:
        """Returns the number of drafts for each sequence in a step of `num_rows` decoding rows, theirs included.

        Called unless the controller `rests`.

        Args:
            unread: per sequence, the tokens that the proposer must read before it can draft, per token still to be
                generated.
            is_alone: whether the step computes no prompts, so that its time can be measured.
        """
        if not records:
            return self._put_off()
        span = steps = 1.0  # choices and steps without drafts that this choice stands for
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
            return [0] * len(records)  # the time of a step without drafts is what all forms are compared with
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
        """Records that `num` of the `num_rows` sequences are new, and evaluates the forms soon if these are many.

        If nothing is drafted, that may have been due to other sequences. If drafts paid off for others, the proposer
        would read the new sequences without any evidence that they pay off too.
        """
        self._num_new += num
        if self._num_new >= NEW_SHARE * num_rows:
            self._num_choices = self._look_every
            if self._is_idle:
                self._next_look = min(self._next_look, self._num_idle + 1)

    def answered(self, record: AcceptanceRecord, asked: int, num: int) -> None:
        """Records that the proposer made `num` of `asked` drafts: n-gram look-up often finds none."""
        for one, memory in ((record, MEMORY), (self._common, COMMON_MEMORY)):
            one.found = one.found * memory + num / asked
            one.asked = one.asked * memory + 1.0
        if self.floor == 0 and num:
            self._common.found += PROBE_WEIGHT * (self._common.asked - self._common.found)
            self._next_look = min(self._next_look, self._num_idle + 1)

    def drafted(self, asked: Sequence[int], seconds: float, *, num_read: int) -> None:
        """Records the seconds that drafting took, reading included.

        Args:
            asked: draft lengths of the sequences that were drafted for.
            num_read: tokens that were read first, of these sequences or of others that can be drafted for only later.
        """
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
        """Records the seconds of a step that had only decoding rows; `num_tokens` includes their drafts."""
        if seconds > 0:
            self._steps.record(num_rows, num_tokens, seconds)
            self._step_s += STEP_WEIGHT * (seconds - self._step_s)

    def verified(self, record: AcceptanceRecord, num: int, right: int) -> None:
        """Records that the first `right` of `num` drafts were kept. Drafts behind a wrong one do not count as tried."""
        for one, memory in ((record, MEMORY), (self._common, COMMON_MEMORY)):
            one.right = one.right * memory + right
            one.tried = one.tried * memory + right + (right < num)

    def branched(self, *, is_met: bool) -> None:
        """Records, for a wrong draft that had alternatives, whether one of them was right."""
        self._rescue += RESCUE_WEIGHT * (is_met - self._rescue)

    @property
    def _is_idle(self) -> bool:
        return self.floor == 0 and not self._is_new

    def _settle(self, there: Sequence[Present], num_rows: int, num_asked: int) -> None:
        """Keeps the form, or takes one that promises clearly more."""
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
        """Returns the tokens per second that each form promises if drafts are made for `num_asked` sequences."""
        promises = [form.promise(there, self._rescue) for form in self._forms]
        step_s = self._steps.seconds(num_rows, [num_rows + math.ceil(one.num_drafts) for one in promises])
        draft_s = self._drafting_s(num_asked, [one.longest for one in promises])
        read_s = [self._reading.seconds(one.due) if one.longest else 0.0 for one in promises]
        return [
            (num_rows + one.num_gained) / max(sum(seconds), 1e-9)
            for one, *seconds in zip(promises, step_s, draft_s, read_s, strict=True)
        ]

    def _drafting_s(self, num_rows: int, longest: list[int]) -> list[float]:
        """Returns the expected seconds of drafting in each form; alternatives cost no less than their chain."""
        by_width = {width: table.seconds(num_rows, longest) for width, table in self._drafting.items()}
        return [max(by_width[1][i], by_width[form.width][i]) for i, form in enumerate(self._forms)]

    def _put_off(self) -> list[int]:
        """Delays the next evaluation and the next probe, as no sequence can be drafted for now."""
        soon = self._num_idle + PATIENCE
        self._next_look, self._next_probe = max(self._next_look, soon), max(self._next_probe, soon)
        return []

    def _probe(self, records: Sequence[AcceptanceRecord]) -> list[int]:
        """Drafts a few tokens for one sequence, another one each time.

        The next probe comes early if it cannot be drafted for.
        """
        self._next_probe = self._num_idle + PROBE_EVERY
        self._num_probes += 1
        self.width = 1
        whose = self._num_probes % len(records)
        return [min(PROBE_LENGTH, self._max_length) if i == whose else 0 for i in range(len(records))]

    def _pause_for(self, seconds: float) -> None:
        """Spaces probes, after one that took `seconds`, so that they take a small share of all time."""
        least = int(seconds / (PROBE_SHARE * self._step_s)) if self._step_s else 0
        longer = max(min(2 * self._probe_every, PROBE_MOST), min(least, PROBE_LEAST_OFTEN))
        self._probe_every = max(self._probe_every, longer)
        self._next_probe = self._num_idle + self._probe_every


def _level(record: AcceptanceRecord, common: float) -> int:
    """Returns the level of a sequence's acceptance rate, mixed with the rate `common` of all sequences."""
    acceptance = (record.right + PRIOR_WEIGHT * common) / (record.tried + PRIOR_WEIGHT)
    return level_of(acceptance)


def _share(record: AcceptanceRecord, common: AcceptanceRecord) -> float:
    """Returns the share of the requested drafts that are made for a sequence, mixed with the share of all sequences."""
    return (record.found + PRIOR_WEIGHT * common.found / common.asked) / (record.asked + PRIOR_WEIGHT)
