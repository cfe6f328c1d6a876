"""Rotary positions of prompts with images, in three directions: time, row and column (M-RoPE, Wang et al. 2024).

A text's tokens have the same position in all three. An image's tokens all have the time at which it begins, and count
rows and columns from there. What follows begins behind the longer side, so that positions fall behind indices. Pure.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sluice_server.engine.images import PromptImage

Longs: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class ImagePositions(NamedTuple):
    """The positions of one prompt's tokens.

    Attributes:
        known: [3, end of the last image].
        behind: what later tokens' positions are behind their index.
    """

    known: Longs
    behind: int

    def of(self, start: int, num: int) -> Longs:
        """Returns the positions of `num` tokens from index `start` on, [3, num]."""
        end = self.known.shape[1]
        later = np.arange(max(start, end), max(start + num, end), dtype=np.int64) - self.behind
        return np.concatenate([self.known[:, start : start + num], np.broadcast_to(later, (3, len(later)))], axis=1)


def positions_of(images: Iterable[PromptImage]) -> ImagePositions:
    """Returns the positions of a prompt with these images, in their order."""
    pieces: list[Longs] = []
    index = at = 0
    for image in images:
        rows, columns = image.grid
        assert image.num_tokens == rows * columns, "every token of the image is in its grid"
        text = np.arange(at, at + image.first - index, dtype=np.int64)
        at += len(text)
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        pieces += [np.broadcast_to(text, (3, len(text))), at + np.stack([np.zeros_like(row), row, column])]
        at += max(rows, columns)
        index = image.end
    return ImagePositions(np.concatenate(pieces, axis=1), index - at)
