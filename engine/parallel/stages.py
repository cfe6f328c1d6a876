"""The stages of a pipeline: each rank passes the hidden states behind its layers to a rank of the next stage.

`Stages` is the protocol. In every launch a rank takes one result of the stage before and gives one to the next,
whatever happens: a failure takes the place of hidden states, so that all are ready for the next launch.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class StageFailed(RuntimeError):
    """An earlier stage could not compute this launch; it tells why by itself."""


class Stages(Protocol):
    """One rank's connections with the stages before and behind its own.

    Each call raises SumsBroken if a rank has ended, or if no rank of the group makes progress in time.

    Attributes:
        timeout_s: without progress of any rank, until the group is given up.
        seconds: spent waiting since start.
    """

    timeout_s: float
    seconds: float

    def begin(self) -> None:
        """Begins a launch. All ranks begin the same launches in the same order."""

    def receive(self, rows: int, width: int, on_progress: Callable[[], None]) -> Tensor:
        """Returns what the stage before has sent, float32 [rows, width]; `on_progress` is called when other ranks have
        computed something meanwhile. Raises StageFailed if an earlier stage has failed."""

    def send(self, states: Tensor, on_progress: Callable[[], None]) -> None:
        """Sends float32 [rows, width] to the next stage."""

    def note_progress(self) -> None:
        """Tells the other ranks that this one has computed something."""

    def settle(self) -> None:
        """Ends a launch: takes what was not taken, and gives a failure if nothing was given."""
