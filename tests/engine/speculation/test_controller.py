"""The draft-length controller in simulated time: near the best fixed length, and hardly below plain decoding."""

import dataclasses

import pytest

from sluice_server.engine.speculation.controller import SpeculationController
from sluice_server.engine.speculation.draft_shapes import FLOORS
from tests.engine.speculation.world import MOST, World, affine, choices, free, model

WORLDS = {
    "memory-bound, copies well": World(affine(10e-3, 0.02e-3), free, [0.9]),
    "memory-bound, copies badly": World(affine(10e-3, 0.02e-3), free, [0.2]),
    "compute-bound": World(affine(0.1e-3, 1e-3), free, [0.5]),
    "many rows": World(affine(5e-3, 0.3e-3), free, [0.3] * 32),
    "a good draft model": World(affine(10e-3, 0.1e-3), model(1e-3), [0.8]),
    "a draft model as slow as its target": World(affine(10e-3, 0.1e-3), model(9e-3), [0.7]),
    "noisy": World(affine(5e-3, 0.3e-3), free, [0.7] * 4, noise=0.3),
    "a staircase": World(lambda rows, tokens: 5e-3 if tokens <= 16 else 12e-3, free, [0.8] * 8),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))
def test_it_comes_near_the_best_fixed_length(world: World) -> None:
    world = dataclasses.replace(world)
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    rate = world.run(controller, 1500)
    best, _ = dataclasses.replace(world, noise=0.0).best()
    assert rate >= 0.88 * best / (1 + (world.noise / 2 + 0.06) * bool(world.noise))


def test_mixed_sequences_are_drafted_for_as_they_deserve() -> None:
    world = World(affine(5e-3, 0.5e-3), free, [0.95] * 4 + [0.1] * 12)
    controller = SpeculationController(MOST)
    world.run(controller, 400)
    chosen = choices(controller, world.records, 16)
    assert min(chosen[:4]) >= 2
    assert sum(chosen[4:]) <= 4
    assert world.run(controller, 1500) >= 1.03 * world.best()[0]


def test_it_lets_go_and_comes_back() -> None:
    """A text that stops repeating itself, and begins again."""
    world = World(affine(5e-3, 0.5e-3), model(0.5e-3), [0.9] * 4)
    controller = SpeculationController(MOST)
    world.run(controller, 200)
    assert min(choices(controller, world.records, 4)) > 2
    world.chances = [0.0] * 4
    world.run(controller, 200)
    assert controller.floor == 0
    world.chances = [0.95] * 4
    world.run(controller, 6000)
    assert min(choices(controller, world.records, 4)) > 2


def test_a_machine_that_became_slow_at_large_steps_is_noticed() -> None:
    world = World(affine(10e-3, 0.02e-3), free, [0.5] * 8)
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    assert controller.floor > 0
    world.step = affine(0.1e-3, 1e-3)
    world.run(controller, 1000)
    assert controller.floor == 0


def test_drafting_nothing_costs_next_to_nothing() -> None:
    world = World(affine(1e-3, 1e-3), model(1e-3), [0.1] * 8)
    controller = SpeculationController(MOST)
    world.run(controller, 500)
    drafted = 0
    rested = 0

    def choose() -> list[int]:
        nonlocal drafted, rested
        rests = controller.rests()
        rested += rests
        chosen = [0] * 8 if rests else controller.choose(world.records, 8)
        drafted += sum(chosen)
        return chosen

    rate = world.play(choose, 5000, controller)
    assert drafted <= 60
    assert rested >= 0.95 * 5000  # hardly a step tries a draft
    assert rate >= 0.98 * world.best()[0]


def test_it_does_not_swing() -> None:
    world = World(affine(5e-3, 0.3e-3), free, [0.6] * 8, noise=0.2)
    controller = SpeculationController(MOST)
    world.run(controller, 1000)
    changes, floor = 0, controller.floor
    for _ in range(1000):
        world.run(controller, 1)
        changes += controller.floor != floor
        floor = controller.floor
    assert changes <= 60


def test_no_draft_is_longer_than_allowed() -> None:
    for most in (1, 3, 64):
        world = World(affine(10e-3, 0.0), free, [1.0])
        controller = SpeculationController(most)
        world.run(controller, 200)
        assert choices(controller, world.records, 1) == [most]


def test_equal_histories_give_equal_choices() -> None:
    found = []
    for _ in range(2):
        world, controller = dataclasses.replace(WORLDS["noisy"]), SpeculationController(MOST)
        world.run(controller, 500)
        found.append((choices(controller, world.records, 4), controller.floor))
    assert found[0] == found[1]
    assert 0 <= found[0][1] < len(FLOORS)
