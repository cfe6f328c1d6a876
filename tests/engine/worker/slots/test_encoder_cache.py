"""Rows of images: computed part by part, kept until they are dropped."""

import math

import pytest
import torch

from sluice_server.engine.images import Grid, PromptImage
from sluice_server.engine.worker.slots.images import EncoderCache


class CountingEncoding:
    """Three parts, then two rows of one number; a number below zero fails in its second part."""

    def __init__(self, number: float, parts: list[float]) -> None:
        self.rows: torch.Tensor | None = None
        self._number = number
        self._parts = parts
        self._left = 3

    def advance(self) -> bool:
        """Computes a part, and records it."""
        self._parts.append(self._number)
        self._left -= 1
        if self._number < 0 and self._left < 2:
            raise RuntimeError("no rows")
        if not self._left:
            self.rows = torch.full((2, 3), self._number)
        return not self._left


class CountingEncoder:
    """Records the parts that it computes."""

    width = 3

    def __init__(self) -> None:
        self.parts: list[float] = []

    def begin(self, pixels: torch.Tensor, grid: Grid) -> CountingEncoding:
        """Begins with the first number of the pixels."""
        assert pixels.shape == (12,) and grid == (1, 2)
        return CountingEncoding(float(pixels[0]), self.parts)


def image(number: int, first: int = 0) -> PromptImage:
    """Returns an image of one number."""
    return PromptImage.at(first, 2, (1, 2), torch.full((3, 2, 2), float(number)).numpy().tobytes())


def test_an_image_is_encoded_part_by_part_and_once() -> None:
    encoder = CountingEncoder()
    cache = EncoderCache(encoder)
    assert [cache.advance(image(1), 0.0) for _ in range(4)] == [False, False, True, True]
    assert encoder.parts == [1, 1, 1] and cache.num_encoded == 1
    assert torch.equal(cache.rows(image(1, first=7)), torch.full((2, 3), 1.0)) and cache.num_found == 1
    cache.drop([image(1).digest, b"another"])
    assert not len(cache)
    assert cache.advance(image(1), math.inf) and encoder.parts == [1] * 6
    assert cache.busy_s > 0


def test_rows_that_no_one_has_asked_for_are_computed_at_once() -> None:
    encoder = CountingEncoder()
    cache = EncoderCache(encoder)
    assert torch.equal(cache.rows(image(2)), torch.full((2, 3), 2.0)) and not cache.num_found


def test_an_image_begins_anew_behind_another_one_and_behind_a_failure() -> None:
    encoder = CountingEncoder()
    cache = EncoderCache(encoder)
    cache.advance(image(1), 0.0)
    cache.advance(image(2), 0.0)
    assert [cache.advance(image(1), 0.0) for _ in range(3)] == [False, False, True]
    for _ in range(2):
        cache.advance(image(-1), 0.0)
        with pytest.raises(RuntimeError):
            cache.advance(image(-1), 0.0)
