"""Streams of a pretended GPU, at their worst.

What is computed is there at once, on whichever stream. A copy from pinned memory that is begun on another stream than
the first leaves garbage, and arrives when that stream is waited for, or computes; it is refused if that stream has not
waited for all that was computed before.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor

Arrive: TypeAlias = Callable[[], None]


class UnorderedCopy(AssertionError):
    """A copy may overwrite what is still read."""


class Stream:
    """See `torch.cuda.Stream`."""

    def __init__(self, device: object = None) -> None:
        """Takes what torch's takes."""
        self.coming: list[Arrive] = []
        self.reached = 0  # of `Streams.num_done`, what it has waited for or computed itself

    def wait_stream(self, other: "Stream") -> None:
        """Makes what follows wait for what the other stream has begun."""
        other.arrive()
        self.reached = max(self.reached, other.reached)

    def arrive(self) -> None:
        """Carries out the copies that are on their way."""
        coming, self.coming = self.coming, []
        for one in coming:
            one()


class Streams:
    """The streams of one device: the first, and which is current."""

    def __init__(self) -> None:
        self.first = Stream()
        self.current = self.first
        self.num_done = 0  # what was computed

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """See `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def compute(self) -> None:
        """Called before anything is computed."""
        self.current.arrive()
        self.num_done += 1
        self.current.reached = self.num_done

    def bring(self, target: Tensor, arrive: Arrive, spoil: Arrive) -> None:
        """Begins a copy from pinned memory to `target`. Raises UnorderedCopy."""
        if self.current is self.first:
            arrive()
            return
        if self.current.reached < self.num_done:
            raise UnorderedCopy(f"{list(target.shape)} is overwritten by a stream that does not wait for its readers")
        spoil()
        self.current.coming.append(arrive)
