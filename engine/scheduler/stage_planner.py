"""Plans steps of a pipeline: one beside those in flight, of sequences that do not wait for what these sample.

Each stage computes another step. A sequence is in several steps in flight only with parts of its prompt, whose tokens
are known; else other sequences fill the stages. No sequence in flight is preempted: where a step would need that, it
waits until the oldest one in flight is applied.
"""

from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler.planner import Planner


class StagePlanner:
    """Plans steps beside those in flight."""

    awaits_drafts = True

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None when there is none without the results in flight."""
        return self._planner.plan(now, is_beside=True)
