"""A machine and its sequences in simulated time, for the tests of the controller."""

import dataclasses
import functools
import random
from collections.abc import Callable

from sluice_server.engine.speculation.controller import AcceptanceRecord, SpeculationController

MOST = 8
Cost = Callable[[int, int], float]  # rows, tokens → seconds
Draft = Callable[[int, int], float]  # rows, length → seconds


@dataclasses.dataclass
class World:
    """A machine and its sequences."""

    step: Cost
    draft: Draft
    chances: list[float]  # that a draft's token is right, by sequence
    noise: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def play(
        self, choose: Callable[[], list[int]], steps: int, controller: SpeculationController | None = None
    ) -> float:
        """The tokens per second of that many steps."""
        seconds = tokens = 0.0
        rows = len(self.chances)
        for _ in range(steps):
            asked = choose()
            drafting = [num for num in asked if num]
            took = self.draft(len(drafting), max(drafting)) * self._jitter() if drafting else 0.0
            step = self.step(rows, rows + sum(asked)) * self._jitter()
            if controller is not None:
                if drafting:
                    controller.drafted(drafting, took, num_read=0)
                controller.stepped(rows, rows + sum(asked), step)
            for i, num in enumerate(asked):
                right = self._right(i, num)
                tokens += 1 + right
                if controller is not None and num:
                    controller.verified(self.records[i], num, right)
            seconds += took + step
        return tokens / seconds

    def run(self, controller: SpeculationController, steps: int) -> float:
        """The tokens per second with the controller's choices."""
        return self.play(lambda: choices(controller, self.records, len(self.chances)), steps, controller)

    def best(self, steps: int = 400) -> tuple[float, int]:
        """The best rate of all fixed lengths, and its length."""
        quiet = dataclasses.replace(self, noise=0.0)
        return max((quiet.play(functools.partial(_all, num, len(self.chances)), steps), num) for num in range(MOST + 1))

    @property
    def records(self) -> list[AcceptanceRecord]:
        if not hasattr(self, "_records"):
            self._records = [AcceptanceRecord() for _ in self.chances]
        return self._records

    def _right(self, i: int, num: int) -> int:
        right = 0
        while right < num and self.rng.random() < self.chances[i]:
            right += 1
        return right

    def _jitter(self) -> float:
        """A factor on the time of a step: mostly small, sometimes large, as when another process has the machine."""
        if not self.noise:
            return 1.0
        return 4.0 if self.rng.random() < 0.02 else 1.0 + self.noise * self.rng.random()


def choices(controller: SpeculationController, records: list[AcceptanceRecord], num_rows: int) -> list[int]:
    """The choices of one step."""
    return [0] * len(records) if controller.rests() else controller.choose(records, num_rows)


def _all(num: int, rows: int) -> list[int]:
    return [num] * rows


def affine(fixed: float, token: float) -> Cost:
    return lambda rows, tokens: fixed + token * tokens


def free(rows: int, length: int) -> float:
    return 0.0


def model(fixed: float) -> Draft:
    """The cost of a draft model: a price for each of its steps."""
    return lambda rows, length: fixed * length
