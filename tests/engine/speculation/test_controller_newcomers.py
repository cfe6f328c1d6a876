"""The draft-length controller in simulated time with unread sequences, probes and new arrivals."""

from sluice_server.engine.speculation.controller import AcceptanceRecord, SpeculationController
from tests.engine.speculation.world import MOST, World, affine, choices, free, model


def test_reading_that_never_pays_is_given_up() -> None:
    """Short outputs behind long prompts: drafts are right, but every few steps a new sequence must be read."""
    world = World(affine(10e-3, 0.5e-3), free, [0.5] * 8)
    controller = SpeculationController(MOST)
    world.run(controller, 100)
    assert controller.floor > 0
    for _ in range(200):
        chosen = choices(controller, world.records, 8)
        if asked := [num for num in chosen if num]:
            controller.drafted(asked, 30e-3, num_read=300)
        controller.stepped(8, 8 + sum(chosen), world.step(8, 8 + sum(chosen)))
    assert controller.floor == 0


def rested(unread: list[float]) -> SpeculationController:
    """A controller that saw good drafts, then only bad ones; reading a token costs it 0.1 ms. It has run many steps of
    sequences with that many unread tokens and right drafts."""
    world = World(affine(10e-3, 0.02e-3), model(0.5e-3), [0.9] * 4)
    controller = SpeculationController(MOST)
    world.run(controller, 50)
    controller.drafted([4] * 4, 2e-3 + 400 * 0.1e-3, num_read=400)
    world.chances = [0.0] * 4
    world.run(controller, 200)
    assert controller.floor == 0
    for _ in range(2000):
        if not controller.rests():
            chosen = controller.choose([AcceptanceRecord(10.0, 10.0) for _ in range(4)], 4, unread)
            if sum(chosen) > 2:  # no probe
                break
        controller.stepped(4, 4, world.step(4, 4))
    return controller


def test_who_has_long_been_unread_is_not_begun_to_be_read_for_the_little_to_come() -> None:
    assert rested([0.0] * 4).floor > 0
    assert rested([2.0] * 4).floor > 0
    assert rested([100.0] * 4).floor == 0


def test_probes_that_have_to_read_come_seldom() -> None:
    world = World(affine(1e-3, 1e-3), model(1e-3), [0.1] * 8)
    spent: dict[int, float] = {}
    for num_read in (0, 300):
        controller = SpeculationController(MOST)
        world.run(controller, 500)
        spent[num_read] = 0.0
        for _ in range(20_000):
            if not controller.rests() and (asked := [n for n in controller.choose(world.records, 8) if n]):
                seconds = 2e-3 + num_read * 1e-4
                controller.drafted(asked, seconds, num_read=num_read)
                spent[num_read] += seconds
            controller.stepped(8, 8, world.step(8, 8))
    plain = 20_000 * world.step(8, 8)
    assert 0 < spent[0] <= 0.01 * plain
    assert 0 < spent[300] <= 0.01 * plain


def test_those_who_wait_to_be_read_say_nothing_about_drafting() -> None:
    """Two sequences have drafts, the others are read in parts: these teach neither cost nor yield."""
    world = World(affine(10e-3, 0.02e-3), free, [0.9] * 4)
    found = []
    for asked in ([4, 4], []):
        controller = SpeculationController(MOST)
        world.run(controller, 50)
        for _ in range(3):
            controller.drafted(asked, 40e-3, num_read=400)
        found.append(controller.choose(world.records, 4))
    assert found[0] == found[1] and min(found[0]) > 2


def test_what_a_step_takes_without_drafts_is_measured_and_not_guessed() -> None:
    """More sequences arrive while all have drafts: short steps of that many rows have never been measured."""
    world = World(affine(10e-3, 0.02e-3), model(0.2e-3), [0.6])
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    assert controller.floor > 0
    many = World(affine(0.1e-3, 0.5e-3), model(0.2e-3), [0.6] * 16)
    many.run(controller, 60)
    assert controller.floor == 0


def test_it_drafts_beside_prompts_that_never_end() -> None:
    """No step can be measured then, and the controller must not wait for one."""
    world = World(affine(10e-3, 0.02e-3), model(0.2e-3), [0.9])
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    records = [AcceptanceRecord(9.0, 10.0) for _ in range(5)]
    assert not any(controller.choose(records, 5))
    assert all(controller.choose(records, 5, is_alone=False))


def test_a_probe_without_an_answer_is_soon_repeated() -> None:
    """The probe is repeated on another sequence: the first one was nearly at its end."""
    world = World(affine(1e-3, 1e-3), model(1e-3), [0.1] * 8)
    controller = SpeculationController(MOST)
    world.run(controller, 500)
    asked: list[int] = []
    for _ in range(3000):
        if not controller.rests() and any(chosen := controller.choose(world.records, 8)):
            asked.append(next(i for i, num in enumerate(chosen) if num))
        controller.stepped(8, 8, world.step(8, 8))
    assert len(asked) >= 30 and len(set(asked)) == 8


def looked(controller: SpeculationController, most: int) -> int:
    """The number of steps until the controller tries any sequence again."""
    return next(i for i in range(most) if not controller.rests())


def test_newcomers_are_looked_at_at_once() -> None:
    """Earlier sequences were not worth a draft, which says nothing about the new ones."""
    world = World(affine(1e-3, 1e-3), model(1e-3), [0.1] * 8)
    waits = []
    for num_new in (0, 1, 2):
        controller = SpeculationController(MOST)
        world.run(controller, 500)
        assert controller.floor == 0
        for _ in range(3):  # until it has just looked, and found nothing
            looked(controller, 64)
            controller.choose(world.records, 8)
        controller.joined(num_new, 8)
        waits.append(looked(controller, 64))
    assert waits[0] == waits[1] > 8  # one of eight is too few to look again
    assert waits[2] == 0


def test_newcomers_are_looked_at_before_they_are_read() -> None:
    """A few sequences were worth drafts; that is no reason to read others without a probe."""
    waits = []
    for num_new in (0, 1, 4):
        world = World(affine(10e-3, 0.02e-3), model(0.5e-3), [0.9] * 4)
        controller = SpeculationController(MOST)
        world.run(controller, 300)
        controller.drafted([4] * 4, 2e-3 + 400 * 0.1e-3, num_read=400)
        for _ in range(8):
            controller.stepped(8, 8, world.step(8, 8))
        records, unread = world.records + [AcceptanceRecord() for _ in range(4)], [0.0] * 4 + [1000.0] * 4
        controller.joined(num_new, 8)
        waits.append(next(i for i in range(64) if not any(controller.choose(records, 8, unread))))
    assert waits[0] == waits[1] >= 4  # one of eight is too few to look again
    assert waits[2] == 0


def test_it_rests_where_no_sequence_can_have_drafts() -> None:
    world = World(affine(1e-3, 1e-3), model(1e-3), [0.1] * 8)
    controller = SpeculationController(MOST)
    world.run(controller, 500)
    assert controller.floor == 0

    def asked(records: list[AcceptanceRecord], steps: int) -> list[int]:
        """The drafts wanted, each time that the controller did not rest."""
        found = []
        for _ in range(steps):
            if not controller.rests():
                found.append(sum(controller.choose(records, 8)))
            controller.stepped(8, 8, world.step(8, 8))
        return found

    nobody = asked([], 2000)
    assert not any(nobody) and len(nobody) <= 2000 / 8 + 1
    assert any(asked(world.records, 64))  # the probe that was due was only put off


def test_whose_drafts_are_seldom_found_says_nothing_of_newcomers() -> None:
    """Steps are expensive and one sequence's text never repeats: the next sequence is drafted for all the same."""
    world = World(affine(3e-3, 0.3e-3), free, [0.9])
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    silent = AcceptanceRecord()
    for _ in range(60):
        if not controller.rests():
            for num in controller.choose([silent], 1):
                if num:
                    controller.drafted([num], 0.0, num_read=0)
                    controller.answered(silent, num, 0)
        controller.stepped(1, 1, world.step(1, 1))
    assert controller.floor == 0
    controller.joined(1, 1)
    assert not controller.rests()
    assert controller.choose([AcceptanceRecord()], 1)[0] > 2


def test_what_is_not_found_for_long_is_hardly_asked_for_until_it_is_found() -> None:
    world = World(affine(3e-3, 0.3e-3), free, [0.9])
    controller = SpeculationController(MOST)
    world.run(controller, 300)
    record = AcceptanceRecord()

    def asked(*, is_found: bool, most: int) -> int:
        """How often drafts were wanted in that many steps."""
        times = 0
        for _ in range(most):
            num = 0 if controller.rests() else controller.choose([record], 1)[0]
            if num:
                times += 1
                controller.drafted([num], 0.1e-3, num_read=0)
                controller.answered(record, num, num * is_found)
                if is_found:
                    controller.verified(record, num, num)
            controller.stepped(1, 1 + num * is_found, world.step(1, 1 + num * is_found))
        return times

    asked(is_found=False, most=200)
    assert controller.floor == 0
    assert asked(is_found=False, most=2000) <= 0.05 * 2000
    assert asked(is_found=True, most=2000) >= 900
