"""Runs a plan and retries it after a failure: first whole, then row by row without drafts, so that only the faulty
request fails; and when the device has no memory for a row, in parts.

Computing a row twice is safe: it writes the same values to the same places, and sampling is stateless. Of two attempts
in flight the second depends on the first: when the first fails, both are computed again, one after the other. A row
whose sequence has ended meanwhile is not: its slot and blocks may be another's by then, or wiped.
"""

import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from sluice_server.engine.errors import DeviceLost, OutOfDeviceMemory, engine_fault
from sluice_server.engine.executor.step_runner import Launcher
from sluice_server.engine.plan import PromptLogprobs, StepPlan, StepResult, VerifiedDrafts

T = TypeVar("T")

logger = logging.getLogger(__name__)


SKIPPED = StepResult([-1], frozenset({0}))  # of a row that nobody waits for


def _all(plan: StepPlan) -> Sequence[bool]:
    """Returns that every row is awaited."""
    return [True] * len(plan.slots)


class StepRetry:
    """One plan on one device, launched at construction. Raises only DeviceLost.

    Attributes:
        ran_out: the device had no memory for the whole plan.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: StepPlan,
        before: "StepRetry | None" = None,
        awaited: Callable[[StepPlan], Sequence[bool]] = _all,
    ) -> None:
        """`before`: the step in flight that samples the plan's unknown tokens. `awaited` returns for each row of the
        plan whether its sequence still waits for it."""
        self.plan = plan
        self.ran_out = False
        self._launcher = launcher
        self._before = before
        self._awaited = awaited
        self._has_failed = False  # the whole launch failed: its rows are computed one by one
        self._result: StepResult | None = None
        self._pending = self._attempt(lambda: launcher.launch(plan))

    @property
    def is_done(self) -> bool:
        """Whether `result` would return without waiting for the device."""
        return self._pending is None or self._pending.is_done

    def result(self) -> StepResult:
        """Returns the step's result, once the result of the step before is known. Raises only DeviceLost."""
        if self._result is None:
            before, self._before = self._before, None
            if before is not None and before._has_failed:  # it was computed from invalid tokens
                self._pending = None
            pending = self._pending
            found = None if pending is None else self._attempt(pending.collect)
            self._result = self._each(before) if found is None else found
        return self._result

    def _attempt(self, call: Callable[[], T]) -> T | None:
        plan = self.plan
        try:
            return call()
        except DeviceLost:
            raise
        except OutOfDeviceMemory:
            self.ran_out = True
            logger.warning("no device memory for %d tokens; computing them in smaller steps", plan.num_tokens)
        except Exception:
            logger.exception("step %d with %d rows failed; trying its rows one by one", plan.step, len(plan.slots))
        return None

    def _each(self, before: "StepRetry | None") -> StepResult:
        """Computes the plan row by row."""
        self._has_failed = True
        plan = self.plan
        if before is not None:
            plan = plan.known(dict(zip(before.plan.slots, before.result().token_ids, strict=True)))
        awaited = self._awaited(self.plan)
        return merge([self._row(plan.row(i)) if is_awaited else SKIPPED for i, is_awaited in enumerate(awaited)])

    def _row(self, plan: StepPlan) -> StepResult:
        if plan.drafts:  # drafts may be what exceeds memory
            result = self._row(plan.without_drafts())
            logprobs = (result.logprobs[0],) if result.logprobs else ()
            return dataclasses.replace(result, logprobs={}, runs={0: VerifiedDrafts((result.token_ids[0],), logprobs)})
        try:
            return self._launcher.launch(plan).collect()
        except DeviceLost:
            raise
        except OutOfDeviceMemory as error:
            if plan.middle:
                first, rest = plan.halves()
                before = self._row(first)
                return before if before.failed else behind(before, self._row(rest))
            return failed_row(error)
        except Exception as error:
            return failed_row(error)


def failed_row(cause: Exception) -> StepResult:
    """Returns the result of a row that failed alone. The caller, which has the request's name, logs the cause."""
    traceback.clear_frames(cause.__traceback__)  # the frames' locals hold tensors
    error = engine_fault()
    error.__cause__ = cause
    return StepResult([-1], frozenset({0}), errors={0: error})


def behind(before: StepResult, rest: StepResult) -> StepResult:
    """Returns the result of a row from those of its halves, with the prompt log probabilities of both."""
    if not before.prompts:
        return rest
    first_half, more = before.prompts[0], rest.prompts.get(0)
    scores = first_half.scores + (more.scores if more is not None else ())
    return dataclasses.replace(rest, prompts={0: PromptLogprobs(first_half.first, scores)})


def merge(results: list[StepResult]) -> StepResult:
    """Merges results of one row each into one result."""
    return StepResult(
        token_ids=[result.token_ids[0] for result in results],
        failed=frozenset(i for i, result in enumerate(results) if result.failed),
        logprobs={i: result.logprobs[0] for i, result in enumerate(results) if result.logprobs},
        runs={i: result.runs[0] for i, result in enumerate(results) if result.runs},
        errors={i: result.errors[0] for i, result in enumerate(results) if result.errors},
        prompts={i: result.prompts[0] for i, result in enumerate(results) if result.prompts},
        pooled={i: result.pooled[0] for i, result in enumerate(results) if result.pooled},
    )
