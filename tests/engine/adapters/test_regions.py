"""Where adapters are in one memory."""

import random

from sluice_server.engine.adapters.regions import Region, Regions


def test_the_first_gap_that_is_large_enough_is_taken() -> None:
    regions = Regions(100)
    assert [regions.take(slot, 30) for slot in range(3)] == [(0, 30), (30, 30), (60, 30)]
    regions.give(1)
    assert regions.take(3, 40) is None and regions.take(4, 10) == Region(30, 10)
    assert regions.close_gaps() == [(2, Region(60, 30), Region(40, 30))]
    assert regions.take(3, 30) == Region(70, 30) and regions[2] == Region(40, 30)


def test_contents_survive_and_all_room_is_found() -> None:
    """Random sizes: what fits by its number alone is taken, behind moves that overwrite nothing."""
    rng, size = random.Random(5), 200
    regions, memory, filled = Regions(size), [-1] * size, dict[int, int]()
    num_closed = 0
    for turn in range(2000):
        if filled and rng.random() < 0.45:
            slot = rng.choice(list(filled))
            regions.give(slot)
            del filled[slot]
            continue
        need = rng.randint(1, 60)
        if sum(filled.values()) + need > size:
            continue
        region = regions.take(turn, need)
        if region is None:
            num_closed += 1
            for _, before, after in regions.close_gaps():
                for at in range(before.size):  # from the front on, as parts are moved
                    memory[after.first + at] = memory[before.first + at]
            region = regions.take(turn, need)
        assert region is not None and region.size == need
        memory[region.first : region.first + need] = [turn] * need
        filled[turn] = need
        for slot, num in filled.items():
            own = regions[slot]
            assert memory[own.first : own.first + num] == [slot] * num
    assert num_closed > 20
