"""The other ranks that compute the steps of a runner on devices of their own, as the runner sees them.

They are told of each step before it begins. Takes slots and numbers, not requests.
"""

from collections.abc import Sequence
from typing import Protocol

from sluice_server.engine.plan import StepPlan
from sluice_server.engine.worker.runner import StepImages
from sluice_server.engine.worker.step_numbers import StepNumbers
from sluice_server.engine.worker.steps import SampledIds


class Followers(Protocol):
    """Other ranks, which compute the same steps on devices of their own."""

    @property
    def sampled_ids(self) -> SampledIds | None:
        """Has the ids that this rank samples on all of them; None where there are none."""

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Tells the tokens of a slot from a position on, which the next step needs."""

    def begin(self, numbers: StepNumbers, *, is_sampled: bool) -> None:
        """Tells them to begin a step. `is_sampled`: the device samples behind it, and not the host."""

    def compute(self, plan: StepPlan) -> StepImages | None:
        """Tells them to compute a plan that cannot be recorded; returns what images give it, if that is known now."""


class NoFollowers:
    """Implements `Followers` where there are no other ranks."""

    sampled_ids = None

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        """Implements `Followers.note`."""

    def begin(self, numbers: StepNumbers, *, is_sampled: bool) -> None:
        """Implements `Followers.begin`."""

    def compute(self, plan: StepPlan) -> StepImages | None:
        """Implements `Followers.compute`."""
        return None


ALONE = NoFollowers()
