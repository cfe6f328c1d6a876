"""Chooses the sequence that is preempted when blocks run short. Pure: sequences in, one of them out.

A paused sequence goes first, as it loses no time while it waits. Then, of those behind the beneficiary in the order of
service: the lowest priority, then the one that was preempted less often, then the least loss, then the youngest. The
loss is the work that is thrown away for each block and step that it frees, by the predicted length of the output: what
is nearly complete would leave its blocks soon anyway. A sequence that was preempted `max_preemptions` times is spared;
the beneficiary waits for a block instead, as `shortage` may decide before. If that leaves a step without a single row,
`last_resort` preempts others for the oldest sequence until it fits. Its order is arrival, which no policy changes. So
one request always ends, at any pool size that fits every single request.
"""

from collections.abc import Callable, Iterable

from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState

Loss = tuple[int, int, float, int, int]  # of a preemption, as a sort key
LossOf = Callable[[Sequence], Loss]


class Losses:
    """What preemptions of running sequences lose."""

    def __init__(self, state: SchedulerState, lengths: OutputLengths) -> None:
        self._state = state
        self._lengths = lengths

    def of(self, sequence: Sequence) -> Loss:
        """Returns the sort key of the sequence; the smallest gives way first."""
        group, num_own = sequence.group, self._state.cache.capacity.num_behind_shared(sequence.table)
        lost = self._state.tokens_lost(sequence) / (max(1, num_own) * self.remaining(sequence))
        return group.priority, sequence.num_preemptions, lost, -group.order, -sequence.index

    def remaining(self, sequence: Sequence) -> float:
        """Returns how many tokens the sequence is predicted to go on for."""
        group = sequence.group
        return self._lengths.remaining(group.request.tenant, sequence.num_output, group.max_tokens)


def is_free(sequence: Sequence, step: int) -> bool:
    """Whether the sequence may be preempted: neither it nor another beam of its search is in this step or in flight."""
    if sequence.group.beam is None:
        return sequence.last_step != step and not sequence.num_flying
    return all(one.last_step != step and not one.num_flying for one in sequence.group.sequences)


def idle(running: Iterable[Sequence], step: int) -> Sequence | None:
    """Returns a sequence that has no work until its client acts; of several, the one held longest."""
    return min(
        (s for s in running if s.is_idle and is_free(s, step)),
        key=lambda s: (s.group.held_since_s, s.key),
        default=None,
    )


def behind(
    running: Iterable[Sequence], beneficiary: Sequence, step: int, max_preemptions: int, loss: LossOf
) -> Sequence | None:
    """Returns the victim that a running sequence may take blocks from."""
    group, key = beneficiary.group, beneficiary.key
    found = (
        s
        for s in running
        if s.key > key and s.num_preemptions < max_preemptions and is_free(s, step) and not _together(s, group)
    )
    return min(found, key=loss, default=None)


def below(
    running: Iterable[Sequence], candidate: Sequence, step: int, max_preemptions: int, loss: LossOf
) -> list[Sequence]:
    """Returns the sequences that a waiting one of higher priority may preempt, first victim first."""
    priority, key = candidate.group.priority, candidate.key
    found = [
        s
        for s in running
        if s.group.priority < priority and s.key > key and s.num_preemptions < max_preemptions and is_free(s, step)
    ]
    return sorted(found, key=loss)


def cheapest(running: Iterable[Sequence], loss: LossOf) -> Sequence | None:
    """Returns the sequence whose preemption loses least, a paused one first; between steps, for a smaller cache."""
    return min(running, key=lambda s: (not s.is_idle, *loss(s)), default=None)


def last_resort(running: Iterable[Sequence], beneficiary: Sequence) -> Sequence | None:
    """Returns the youngest of all other sequences."""
    found = (s for s in running if s is not beneficiary and not _together(s, beneficiary.group))
    return max(found, key=lambda s: (s.group.order, s.index), default=None)


def _together(sequence: Sequence, group: object) -> bool:
    """Whether both are hypotheses of one search, which do not preempt each other."""
    return sequence.group is group and sequence.group.beam is not None
