"""The best possible gain of speculation, from measured costs of steps by drafts verified, of drafting and of reading
prompts, and from acceptance by position. Pure arithmetic: it runs no engine and keeps no clock.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sluice_server.engine.engine import StepEvents, StepSplit
from sluice_server.engine.scheduler.draft_stats import DraftStats


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Seconds at one concurrency, all rows of a step having as many drafts.

    Attributes:
        step_s: of a step that verifies so many drafts a row, without making them.
        draft_s: of making so many for all rows.
        reading_s: in which the proposer reads all prompts together.
    """

    step_s: Mapping[int, float]
    draft_s: Mapping[int, float]
    reading_s: float


class StepWatch:
    """Notes the cost of an engine's steps in which all of `num_rows` decode and verify alike."""

    def __init__(self, split: StepSplit, num_rows: int) -> None:
        self.step_s: dict[int, list[float]] = defaultdict(list)
        self.draft_s: dict[int, list[float]] = defaultdict(list)
        self._split = split
        self._before = dict(split.parts())
        self._num_rows = num_rows

    def note(self, events: StepEvents) -> None:
        """Notes a step of the engine."""
        now = dict(self._split.parts())
        took = {part: seconds - self._before[part] for part, seconds in now.items()}
        self._before = now
        lengths = {event.num_drafted for event in events.sampled}
        is_plain = all(event.first_index and not event.is_last for event in events.sampled)
        if len(events.sampled) == self._num_rows and len(lengths) == 1 and is_plain:
            self.draft_s[min(lengths)].append(took["draft"])
            self.step_s[min(lengths)].append(took["plan"] + took["compute"] + took["apply"])


def costs(plain: StepWatch, fixed: Mapping[int, StepWatch]) -> Costs:
    """The costs of plain decoding, and of engines with a fixed number of drafts."""
    of_length = {num: watch for num, watch in fixed.items() if watch.step_s[num]}
    draft_s = {num: statistics.median(watch.draft_s[num]) for num, watch in of_length.items()}
    steps = {num: statistics.median(watch.step_s[num]) for num, watch in of_length.items()}
    shortest = min(draft_s, default=0)  # whose steps differ most from those that read
    usual = draft_s.get(shortest, 0.0)
    reading_s = sum(took - usual for took in fixed[shortest].draft_s[shortest] if took > 3 * usual) if draft_s else 0.0
    return Costs({0: statistics.median(plain.step_s[0]), **steps}, draft_s, reading_s)


def acceptance(stats: Sequence[DraftStats]) -> list[float]:
    """Acceptance by position: the share of drafts that were right there and at all earlier positions."""
    most = max(len(one.drafted_at) for one in stats)
    drafted = [sum(one.drafted_at[i] for one in stats if i < len(one.drafted_at)) for i in range(most)]
    kept = [sum(one.accepted_at[i] for one in stats if i < len(one.accepted_at)) for i in range(most)]
    return [right / max(1, num) for right, num in zip(kept, drafted, strict=True)]


def bound(plain_s: float, num_steps: float, found: Costs, accepted: Sequence[float]) -> tuple[float, int]:
    """The speed-up that the best length allows, and that length.

    Args:
        plain_s: that plain decoding of a load took, its prompts included.
        num_steps: of these, steps that decode a full batch.
    """
    rest_s = plain_s - num_steps * found.step_s[0]
    best = (1.0, 0)
    for num, draft_s in found.draft_s.items():
        steps_s = num_steps / (1 + sum(accepted[:num])) * (found.step_s[num] + draft_s)
        best = max(best, (plain_s / (rest_s + found.reading_s + steps_s), num))
    return best
