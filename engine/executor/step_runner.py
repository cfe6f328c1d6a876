"""The interface of a runner, which computes an engine's plans: launch and collect, block transfers, placements.

`engine.worker` has the runners of this process; `engine.build` chooses one.
"""

from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step in flight."""

    @property
    def is_done(self) -> bool:
        """Whether the step, and all before it, have been waited for already."""

    def collect(self) -> StepResult:
        """Waits for the device and returns the sampled tokens."""


class Launcher(Protocol):
    """Computes plans asynchronously: `launch` returns before the device is done."""

    def launch(self, plan: StepPlan) -> Pending:
        """Starts computing the plan's rows, whose slots are in place. Raises OutOfDeviceMemory, DeviceLost, others."""


class StepRunner(Launcher, Protocol):
    """All that the engine needs of a runner."""

    @property
    def depth(self) -> int:
        """Number of steps that may be in flight while the next one is planned."""

    @property
    def progress(self) -> int:
        """Number of layers computed since start."""

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Registers `on_layer`, called after each computed layer."""

    def move(self, moves: list[Move]) -> None:
        """Carries out transfers between cache blocks and tiers in order; those with the disk run in the background."""

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the transfers with the disk that have ended since the last call, each with whether it succeeded."""

    def place(self, plan: StepPlan) -> None:
        """Applies the plan's placements and block-table additions."""

    def idle(self) -> bool:
        """Prepares a little for later steps; returns False when nothing is left to prepare. Called only while there is
        no work, as it may take long."""
