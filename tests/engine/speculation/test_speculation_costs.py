"""The measured costs of steps, and what is derived from them."""

from sluice_server.engine.speculation.costs import CostTable, coarse


def test_costs_are_read_between_what_was_measured() -> None:
    table = CostTable(from_nothing=False)
    assert table.seconds(4, [4]) == [0.0]
    for _ in range(4):
        table.record(4, 4, 1.0)
        table.record(4, 12, 3.0)
    assert table.seconds(4, [4, 8, 12, 16]) == [1.0, 2.0, 3.0, 4.0]
    assert table.seconds(5, [8]) == [2.0]  # rows alike


def test_one_measurement_decides_nothing() -> None:
    table = CostTable(from_nothing=False)
    for _ in range(4):
        table.record(1, 4, 1.0)
    table.record(1, 8, 50.0)
    assert table.seconds(1, [8])[0] < 2.0
    for _ in range(20):
        table.record(1, 4, 1.0)
    table.record(1, 4, 50.0)
    assert table.seconds(1, [4])[0] < 1.1


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    table = CostTable(from_nothing=False)
    for _ in range(4):
        table.record(1, 8, 9.0)
    for _ in range(5000):
        table.record(1, 4, 1.0)
    assert table.seconds(1, [8])[0] < 2.0


def test_nearby_numbers_share_an_entry() -> None:
    assert [coarse(number, 1) for number in (1, 2, 3, 5, 7, 12, 100)] == [1, 2, 3, 4, 6, 12, 96]
    assert coarse(15, 3) == 15 and coarse(35, 3) == 32
