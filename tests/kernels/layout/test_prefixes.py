"""Groups of rows that share a prefix: found by their block tables, and only where sharing pays."""

import numpy as np
import pytest

from sluice_server.kernels.layout.prefixes import MOST_GROUPS, PrefixGroups, shared_prefixes

BLOCK = 4


def found(rows: list[list[int]], starts: list[int], least: int = 1) -> PrefixGroups | None:
    width = max(map(len, rows))
    tables = np.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=np.int32)
    return shared_prefixes(tables, np.array(starts, dtype=np.int64), BLOCK, least)


@pytest.mark.parametrize(
    ("rows", "starts", "want"),
    [
        pytest.param([[1, 2], [3, 4]], [5, 5], None, id="nothing"),
        pytest.param([[1, 2, 3], [7], [1, 2, 4]], [9, 2, 10], PrefixGroups([0, 2, 1], [2], [8]), id="one group"),
        pytest.param([[1, 2, 3], [1, 2, 3]], [9, 8], PrefixGroups([0, 1], [2], [8]), id="to the token's own block"),
        pytest.param([[1, 2], [1, 2]], [3, 7], None, id="no whole block"),
        # The tables of both end behind the first block: what is there means nothing.
        pytest.param([[1], [1], [5]], [3, 3, 1], None, id="nothing behind their ends"),
        pytest.param(
            [[1, 2, 3, 4, 9], [1, 5, 6, 7, 9], [1, 2, 3, 4, 8], [1, 5, 6, 7, 8]],
            [17] * 4,
            PrefixGroups([0, 2, 1, 3], [2, 2], [16, 16]),
            id="forks of two prompts that begin alike",
        ),
        pytest.param(
            [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 3, 5, 7], [1, 2, 3, 6, 4]],
            [17] * 4,
            PrefixGroups([0, 1, 2, 3], [4], [12]),
            id="a system prompt and one longer pair",
        ),
    ],
)
def test_groups(rows: list[list[int]], starts: list[int], want: PrefixGroups | None) -> None:
    assert found(rows, starts) == want


def test_what_saves_too_little_is_left_alone() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert found(rows, [9] * 3, least=16) is not None  # two rows need not read two blocks of four
    assert found(rows, [9] * 3, least=17) is None


def test_no_more_groups_than_a_step_has_room_for() -> None:
    """The groups that save most are kept."""
    rows = [[10 * pair + i for i in range(1 + pair)] + [900 + 2 * pair + one] for pair in range(12) for one in range(2)]
    prefixes = found(rows, [4 * len(row) - 1 for row in rows])
    assert prefixes is not None and len(prefixes.sizes) == MOST_GROUPS
    assert prefixes.lengths == [4 * num for num in range(12, 12 - MOST_GROUPS, -1)]
    assert sorted(prefixes.order) == list(range(24)) and prefixes.order[:2] == [22, 23]
    assert prefixes.order[2 * MOST_GROUPS :] == list(range(8))
