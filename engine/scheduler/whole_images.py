"""Keeps each image within one step, for models whose attention lets all tokens of an image see one another. Pure.

A step may take more tokens than its budget for that, though for one image only: else an image that is larger than the
budget, or than what decoding leaves of it, would never be computed.
"""

from collections.abc import Iterable, Sequence

from sluice_server.engine.images import PromptImage

Row = tuple[Sequence[PromptImage], int, int]  # images of a prompt, position of its first token in the step, tokens


def uncut(images: Sequence[PromptImage], start: int, num: int, room: int, *, is_first: bool) -> int:
    """Returns how many tokens of a prompt a step computes from `start` on, so that no image ends behind them.

    Args:
        num: its share; less if others have taken more than theirs.
        room: tokens that are left of the step's budget, within which the share may grow.
        is_first: no other prompt is in the step, so that the budget may be exceeded.
    """
    num = min(num, room)
    if num <= 0:
        return 0
    cut = next((one for one in images if one.first < start + num < one.end), None)
    if cut is None:
        return num
    if cut.end - start <= room or (is_first and cut.first <= start):
        return cut.end - start
    return max(0, cut.first - start)


def wholes_of(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Returns the ranges of a step's tokens that are of one image, two tokens at least."""
    found, before = [], 0
    for images, start, num in rows:
        for one in images:
            first, end = max(start, one.first), min(start + num, one.end)
            if end - first > 1:
                assert end == one.end, "no image is cut"
                found.append((before + first - start, before + end - start))
        before += num
    return found
