"""Who gives way when blocks run short. Pure: sequences in, one of them out.

Who is paused goes first, as it loses nothing while it waits. Then: of those behind the beneficiary, the lowest
priority, then the least computed (least work lost), then the youngest. Who was preempted often enough is spared: the
beneficiary waits for a block instead. When that leaves a step without a single row, `last_resort` serves the oldest
sequence from all others, by arrival, which no policy moves: so at any pool size that fits every single request, one
always ends.
"""

from collections.abc import Iterable

from sluice_server.engine.scheduler.sequence import Sequence


def is_free(sequence: Sequence, step: int) -> bool:
    """Not part of this step, nor goes with one that is."""
    if sequence.group.beam is None:
        return sequence.last_step != step
    return all(one.last_step != step for one in sequence.group.sequences)


def idle(running: Iterable[Sequence], step: int) -> Sequence | None:
    """A sequence that cannot go on until its client acts; the longest so first."""
    return min(
        (s for s in running if s.is_idle and is_free(s, step)),
        key=lambda s: (s.group.held_since_s, s.key),
        default=None,
    )


def behind(running: Iterable[Sequence], beneficiary: Sequence, step: int, max_preemptions: int) -> Sequence | None:
    """The victim that a running sequence may take blocks from."""
    group, key = beneficiary.group, beneficiary.key
    found = (
        s
        for s in running
        if s.key > key and s.num_preemptions < max_preemptions and is_free(s, step) and not _together(s, group)
    )
    return min(found, key=_loss, default=None)


def below(running: Iterable[Sequence], candidate: Sequence, step: int, max_preemptions: int) -> list[Sequence]:
    """Those that a waiting sequence of higher priority may displace, first victim first."""
    priority, key = candidate.group.priority, candidate.key
    found = [
        s
        for s in running
        if s.group.priority < priority and s.key > key and s.num_preemptions < max_preemptions and is_free(s, step)
    ]
    return sorted(found, key=_loss)


def last_resort(running: Iterable[Sequence], beneficiary: Sequence) -> Sequence | None:
    """Anybody else, the youngest first."""
    found = (s for s in running if s is not beneficiary and not _together(s, beneficiary.group))
    return max(found, key=lambda s: (s.group.order, s.index), default=None)


def _together(sequence: Sequence, group: object) -> bool:
    """Hypotheses of one search do not displace each other."""
    return sequence.group is group and sequence.group.beam is not None


def _loss(sequence: Sequence) -> tuple[int, int, int, int]:
    return (sequence.group.priority, sequence.num_computed, -sequence.group.order, -sequence.index)
