"""A step that a device is computing, and its result once the sampled ids are there.

Takes plans and ids; depends on no model.
"""

import itertools
from collections.abc import Sequence

from sluice_server.engine.plan import StepPlan, StepResult, VerifiedDrafts, num_accepted
from sluice_server.engine.speculation.trees import walk
from sluice_server.engine.worker.device import HostCopy

BAD = -1  # marks a row whose logits hold no usable number
NONE: frozenset[int] = frozenset()


class LaunchedStep:
    """A step that the device is computing."""

    is_done = False

    def __init__(self, plan: StepPlan, arrival: HostCopy, order: Sequence[int] = ()) -> None:
        """Holds the plan and the pending result; `order`: the order of the rows on the device, if it differs."""
        self._plan = plan
        self._arrival = arrival
        self._order = order
        self._result: StepResult | None = None

    def collect(self) -> StepResult:
        """Waits for the device and returns the sampled tokens."""
        if self._result is None:
            ids, plan = self._arrival.wait().tolist(), self._plan
            if not plan.drafts:  # one id behind each row
                self._result = result_without_drafts(plan, _in_order(ids, self._order))
                return self._result
            ends = itertools.accumulate(plan.query_lens)
            rows = [ids[end - num : end] for end, num in zip(ends, plan.query_lens, strict=True)]
            self._result = result_of(plan, rows)
        return self._result

    def sampled(self) -> dict[int, int]:
        """Returns the first token that each slot sampled."""
        return dict(zip(self._plan.slots, self.collect().token_ids, strict=True))


def result_of(plan: StepPlan, rows: list[list[int]]) -> StepResult:
    """Returns the result of a uniform step, given the sampled ids of each row.

    What is behind a wrong draft is ignored.
    """
    failed, runs, end = set(), {}, 0
    for i, ids in enumerate(rows):
        end += len(ids)
        drafts, parents = plan.drafted(i, end), plan.parents.get(i)
        if parents is None:
            run, standing = ids, ids[: 1 + num_accepted(drafts, ids)]
        else:
            run = standing = [ids[0], *(ids[1 + j] for j in walk(drafts, parents, ids))]
        if BAD in standing:
            failed.add(i)
        elif drafts:
            runs[i] = VerifiedDrafts(tuple(run))
    return StepResult([ids[0] for ids in rows], frozenset(failed), runs=runs)


def result_without_drafts(plan: StepPlan, ids: list[int]) -> StepResult:
    """Returns the result of a step without drafts, given the id sampled behind each row's last token."""
    failed = frozenset(i for i, samples in enumerate(plan.samples) if samples and ids[i] == BAD) if BAD in ids else NONE
    if all(plan.samples):
        return StepResult(ids, failed)
    return StepResult([one if samples else -1 for one, samples in zip(ids, plan.samples, strict=True)], failed)


def _in_order(ids: list[int], order: Sequence[int]) -> list[int]:
    """Returns the ids of rows in the order of the plan; `order`: theirs, if it is another."""
    if not order:
        return ids
    found = [BAD] * len(ids)
    for row, one in zip(order, ids, strict=True):
        found[row] = one
    return found


def is_uniform(plan: StepPlan) -> bool:
    """Returns whether every row samples behind each of its tokens."""
    drafts = plan.drafts
    if not drafts:
        return plan.num_tokens == len(plan.slots) and all(plan.samples)
    return all(
        samples and drafts.get(i, 0) == length - 1
        for i, (length, samples) in enumerate(zip(plan.query_lens, plan.samples, strict=True))
    )
