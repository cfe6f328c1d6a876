"""Rotary positions of prompts with images, and what turns tokens by them."""

import numpy as np
import torch

from sluice_server.engine.images import Grid, PromptImage
from sluice_server.engine.models.by_layer import RopeConfig
from sluice_server.engine.models.rope import section_axes
from sluice_server.engine.worker.slots.image_positions import positions_of

CPU = torch.device("cpu")


def image(first: int, grid: Grid) -> PromptImage:
    """Returns an image at a place."""
    return PromptImage(first, grid[0] * grid[1], grid, b"", b"")


def test_positions_count_text_then_rows_and_columns() -> None:
    found = positions_of([image(2, (2, 3)), image(9, (2, 1))])
    assert found.of(0, 13).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9],
    ]


def test_any_part_of_a_prompt_has_the_positions_of_the_whole() -> None:
    found = positions_of([image(0, (1, 4)), image(4, (3, 2))])
    whole = found.of(0, 20)
    for start in range(20):
        for num in range(1, 21 - start):
            assert np.array_equal(found.of(start, num), whole[:, start : start + num])


def test_sections_lie_behind_each_other_or_take_turns() -> None:
    for interleaved, axes in ((False, [0, 0, 1, 1, 1, 2, 2, 2]), (True, [0, 1, 2, 0, 1, 2, 0, 1])):
        made = section_axes(RopeConfig(sections=(2, 3, 3), interleaved=interleaved), 8, CPU)
        assert made is not None and made.tolist() == axes
    assert section_axes(RopeConfig(), 8, CPU) is None
