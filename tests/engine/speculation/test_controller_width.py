"""The draft-length controller in simulated time where drafts may branch: as wide as pays and no wider."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from sluice_server.engine.speculation.controller import AcceptanceRecord, SpeculationController
from sluice_server.engine.speculation.draft_shapes import FLOORS

MOST, WIDTH = 12, 3


@dataclasses.dataclass
class World:
    """A machine with branching drafts: an alternative replaces a wrong draft with probability `rescue`."""

    step: Callable[[int], float]  # tokens → seconds
    draft: Callable[[int, int], float]  # length, width → seconds
    chance: float  # that a draft's token is right
    rescue: float
    num: int = 2  # sequences

    def __post_init__(self) -> None:
        self.rng = random.Random(2)
        self.records = [AcceptanceRecord() for _ in range(self.num)]
        self.widths: list[int] = []

    def run(self, controller: SpeculationController, steps: int) -> float:
        """Tokens per second."""
        seconds, tokens = 0.0, 0
        for _ in range(steps):
            lengths = [0] * self.num if controller.rests() else controller.choose(self.records, self.num)
            width = controller.width
            drafting = [num for num in lengths if num]
            took = self.draft(max(drafting), width) if drafting else 0.0
            step = self.step(self.num + width * sum(lengths))
            if drafting:
                controller.drafted(drafting, took, num_read=0)
                self.widths.append(width)
            controller.stepped(self.num, self.num + width * sum(lengths), step)
            tokens += sum(self.verify(controller, i, num, width) for i, num in enumerate(lengths))
            seconds += took + step
        return tokens / seconds

    def verify(self, controller: SpeculationController, i: int, num: int, width: int) -> int:
        """The number of tokens that a sequence advances by."""
        right = 0
        while right < num and self.rng.random() < self.chance:
            right += 1
        if not num:
            return 1
        controller.verified(self.records[i], num, right)
        if right == num or width == 1:
            return 1 + right
        is_met = self.rng.random() < self.rescue
        controller.branched(is_met=is_met)
        return 1 + right + is_met


def cheap(length: int, width: int) -> float:
    return 0.2e-3 * length


def memory_bound(tokens: int) -> float:
    return 10e-3 + 0.01e-3 * tokens


def compute_bound(tokens: int) -> float:
    return 0.2e-3 + 1e-3 * tokens


def rate(world: World, width: int) -> float:
    """The rate with drafts of that width at most, after learning."""
    world = dataclasses.replace(world)
    controller = SpeculationController(MOST, width)
    world.run(controller, 600)
    return world.run(controller, 3000)


def test_it_branches_where_tokens_are_cheap_and_alternatives_right() -> None:
    world = World(memory_bound, cheap, chance=0.5, rescue=0.7)
    assert rate(world, WIDTH) >= 1.1 * rate(world, 1)
    controller = SpeculationController(MOST, WIDTH)
    world.run(controller, 1000)
    assert controller.width == WIDTH and controller.floor >= len(FLOORS)


@pytest.mark.parametrize(
    "world",
    [
        World(memory_bound, cheap, chance=0.8, rescue=0.0),
        World(compute_bound, cheap, chance=0.5, rescue=0.3, num=8),
        World(memory_bound, lambda length, width: 1e-3 * length * width**2, chance=0.8, rescue=0.3),
    ],
    ids=["alternatives are wrong", "tokens are dear", "alternatives are dear"],
)
def test_it_keeps_to_chains_or_to_nothing_where_that_is_faster(world: World) -> None:
    assert rate(world, WIDTH) >= 0.95 * rate(world, 1)
    controller = SpeculationController(MOST, WIDTH)
    world.run(controller, 1000)
    before = len(world.widths)
    world.run(controller, 3000)
    later = world.widths[before:]
    assert later.count(WIDTH) <= 0.1 * 3000


def test_it_does_not_swing_between_forms() -> None:
    world = World(memory_bound, cheap, chance=0.6, rescue=0.35)
    controller = SpeculationController(MOST, WIDTH)
    world.run(controller, 1000)
    changes, form = 0, controller.floor
    for _ in range(1000):
        world.run(controller, 1)
        changes += controller.floor != form
        form = controller.floor
    assert changes <= 60


def test_alternatives_that_became_right_are_tried_again() -> None:
    world = World(memory_bound, cheap, chance=0.5, rescue=0.0)
    controller = SpeculationController(MOST, WIDTH)
    world.run(controller, 1000)
    world.rescue = 0.8
    world.run(controller, 4000)
    assert controller.width == WIDTH


def test_no_tree_has_more_drafts_than_allowed() -> None:
    for most, width in ((12, 3), (8, 8), (5, 2), (3, 8), (1, 4)):
        controller = SpeculationController(most, width)
        world = World(memory_bound, cheap, chance=0.9, rescue=0.9)
        for _ in range(300):
            world.run(controller, 1)
            lengths = controller.choose(world.records, world.num)
            assert controller.width <= width and max(lengths) * controller.width <= most
