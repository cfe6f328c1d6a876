"""Rows of images that are kept: those used last, within a number of bytes."""

import torch

from sluice_server.engine.images import PromptImage
from sluice_server.engine.worker.slots.images import EncoderCache

ROW_BYTES = 4 * 2 * 3  # of two tokens of three numbers


class CountingEncoder:
    """Answers with the first number of the pixels, and records it."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns two rows of one number."""
        assert pixels.shape == (3, 2, 2)
        self.encoded.append(int(pixels[0, 0, 0]))
        return torch.full((2, 3), float(pixels[0, 0, 0]))


def image(number: int, first: int = 0) -> PromptImage:
    """Returns an image of one number."""
    return PromptImage.at(first, 2, torch.full((3, 2, 2), float(number)).numpy().tobytes())


def test_the_least_recently_used_rows_go_first() -> None:
    encoder = CountingEncoder()
    cache = EncoderCache(encoder, 2 * ROW_BYTES)
    for number in (1, 2, 1, 3, 1, 2, 3):
        assert torch.equal(cache.rows(image(number, first=number)), torch.full((2, 3), float(number)))
    assert encoder.encoded == [1, 2, 3, 2, 3]
    assert cache.num_encoded == 5


def test_the_last_image_is_kept_whatever_its_size() -> None:
    encoder = CountingEncoder()
    cache = EncoderCache(encoder, ROW_BYTES - 1)
    for number in (1, 1, 2, 2, 1):
        cache.rows(image(number))
    assert encoder.encoded == [1, 2, 1]
