"""What an engine asks of whatever computes its plans: launch and collect, transfers of blocks, placements.

`engine.worker` has the runners of this process; see `engine.build`.
"""

from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.kv_cache.tiers import Move
from sluice_server.engine.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step in flight."""

    @property
    def is_done(self) -> bool:
        """Whether the step, and all before it, have been waited for already."""

    def collect(self) -> StepResult:
        """Wait for the device and return the sampled tokens."""


class Launcher(Protocol):
    """What computes. Launch returns before the device is done."""

    def launch(self, plan: StepPlan) -> Pending:
        """Start computing the plan's rows, whose slots are in place. Raises OutOfDeviceMemory, DeviceLost, anything."""


class StepRunner(Launcher, Protocol):
    """What the engine needs of a runner."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight while the next one is planned."""

    @property
    def progress(self) -> int:
        """Layers computed since start."""

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Have `on_layer` called after each layer computed."""

    def move(self, moves: list[Move]) -> None:
        """Carry out transfers between cache blocks and tiers in their order; those with the disk go on meanwhile."""

    def moved(self) -> list[tuple[Move, bool]]:
        """Transfers with the disk that have ended since the last call, and whether well."""

    def place(self, plan: StepPlan) -> None:
        """Apply the plan's placements and block-table additions."""

    def idle(self) -> bool:
        """Prepare for steps to come, a little; False when there is nothing left to prepare. Only while there is no
        work: it may take long."""
