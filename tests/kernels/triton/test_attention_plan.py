"""Plans of attention: every key of every query is computed once, the longest item is short, and bounds hold."""

import random

import pytest
import torch

from sluice_server.kernels.triton.attention_plan import AttentionPlan, Division, PlannedRows, planned

Row = tuple[int, int]  # tokens, keys
DECODE = Division(least=1, most=16, block=4, tile=16, part=64, programs=6)
PREFILL = Division(least=2, most=1000, block=32, tile=16, part=128, programs=5)


def plan_of(rows: list[Row], division: Division, prefixes: list[int] | None = None, room: int = 0) -> AttentionPlan:
    """The plan of rows; `room` tokens are padding."""
    starts = torch.tensor([0, *(num for num, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    before = None if prefixes is None else torch.tensor(prefixes, dtype=torch.int32)
    most = min(division.most, max(num for num, _ in rows))
    bounds = len(rows), int(starts[-1]) + room, most, max(context for _, context in rows)
    return planned(PlannedRows(starts, contexts, before), bounds, division, 2, 4)


def check(plan: AttentionPlan, rows: list[Row], division: Division, prefixes: list[int] | None = None) -> list[int]:
    """Whether items cover the keys that each unit's queries see; returns the keys of each item, in order."""
    items = [item for item in plan.items.tolist() if item[3]]
    assert not plan.items[len(items) :].any(), "items are not in front"
    units = {}
    for i, (num, context) in enumerate(rows):
        for skipped in range(0, num if division.least <= num <= division.most else 0, division.block):
            first = 0 if prefixes is None else prefixes[i]
            if division.window:
                first = max(0, context - num + skipped - division.window + 1) // division.tile * division.tile
            end = min(context, context - num + skipped + division.block) if division.is_causal else context
            if end > first:
                units[i, skipped] = first, end
    entries, slots = plan.entries.tolist(), set[int]()
    tokens = torch.tensor([0, *(num for num, _ in rows)]).cumsum(0).tolist()
    found: dict[tuple[int, int], list[list[int]]] = {}
    for item in items:
        found.setdefault((item[0], item[1]), []).append(item)
    assert set(found) == set(units)
    for (row, skipped), own in found.items():
        own.sort(key=lambda item: item[2])
        first, end = units[row, skipped]
        assert [item[2] for item in own] == [first, *(item[3] for item in own[:-1])] and own[-1][3] == end
        queries = range(skipped, min(rows[row][0], skipped + division.block))
        if own[0][4] < 0:
            assert len(own) == 1 and not division.is_merged
            continue
        assert all(item[5] == len(own) for item in own)
        for i, query in enumerate(queries):
            mine = [item[4] + i * len(own) for item in own]
            (entry,) = (one for one in entries if one[2] and one[0] == tokens[row] + query)
            assert mine == list(range(entry[1], entry[1] + entry[2]))
            slots.update(mine)
            if division.is_merged:
                assert entries[entry[0]] == entry
    assert len(slots) == sum(one[2] for one in entries) and max(slots, default=0) < len(plan.parts)
    return [item[3] - item[2] for item in items]


ROWS: dict[str, list[Row]] = {
    "one": [(1, 1)],
    "long": [(1, 1000)],
    "one long among short": [(1, 30), (1, 20), (1, 1000), (1, 64), (1, 65)],
    "even": [(1, 200)] * 6,
    "drafts": [(3, 500), (5, 90), (1, 7), (16, 16), (0, 0)],
    "mixed": [(1, 40), (70, 300), (2, 900), (1, 900), (33, 33)],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("division", [DECODE, PREFILL, DECODE._replace(window=50), PREFILL._replace(window=70)])
def test_every_key_is_computed_once(name: str, division: Division) -> None:
    """And no item is longer than one and a half fair parts, or the least one."""
    rows = ROWS[name]
    items = check(plan_of(rows, division, room=9), rows, division)
    fair = max(sum(items) / division.programs, division.part)
    assert max(items, default=0) <= 1.5 * fair + division.tile


def test_one_long_row_does_not_keep_the_others_waiting() -> None:
    rows = [(1, 100)] * 12 + [(1, 4000)]
    items = check(plan_of(rows, DECODE), rows, DECODE)
    assert max(items) < 1300 and items == sorted(items, reverse=True)  # 5,200 keys among 6 programs
    assert len(items) == 12 + 5


def test_many_rows_are_not_split_and_begin_with_the_longest() -> None:
    """More units than the planning program looks at together."""
    rng = random.Random(1)
    rows = [(1, rng.randrange(1, 500)) for _ in range(300)]
    plan = plan_of(rows, DECODE)
    items = check(plan, rows, DECODE)
    assert len(items) == 300 and min(items[:20]) > 300 and max(items[-50:]) < 200
    assert len(plan.items) == 309


@pytest.mark.parametrize("name", ROWS)
def test_fixed_parts_end_at_multiples(name: str) -> None:
    """As many as there is room for, of the longest rows first; the others are whole."""
    division = DECODE._replace(is_fixed=True, programs=2, window=90 if name == "long" else 0)
    rows = ROWS[name]
    plan = plan_of(rows, division)
    check(plan, rows, division)
    parts = [item for item in plan.items.tolist() if item[3] and item[4] >= 0]
    assert all(item[3] % 64 == 0 or item[3] - item[2] < 64 for item in parts)
    assert all(item[2] // 64 == (item[3] - 1) // 64 for item in parts)
    assert bool(parts) == (name != "one")


@pytest.mark.parametrize("prefixes", [[64, 64, 0, 16], [0, 0, 0, 0]])
def test_what_is_merged_with_more_is_always_a_part(prefixes: list[int]) -> None:
    rows = [(1, 70), (1, 900), (1, 20), (1, 17)]
    division = DECODE._replace(is_merged=True, most=1)
    check(plan_of(rows, division, prefixes, room=2), rows, division, prefixes)
    groups = [(3, 700), (0, 0), (9, 64)]
    division = DECODE._replace(is_merged=True, is_causal=False)
    check(plan_of(groups, division, room=2), groups, division)
