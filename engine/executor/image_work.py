"""Encodes images between steps, a little at a time, so that requests that decode do not wait for a picture."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.images import PromptImage
from sluice_server.engine.scheduler.images import ImageBooks

logger = logging.getLogger(__name__)

ALONE_S = 0.02  # while no request is computed: new ones are looked at so often
MEAN_WEIGHT = 0.05  # of a step in the mean of the last twenty or so
LONG = 1.25  # times the mean: nothing is encoded behind a step that takes longer


class ImageRows(Protocol):
    """Computes and keeps rows of images."""

    @property
    def part_s(self) -> float:
        """Seconds that a part of an image takes; 0 before the first."""

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Encodes an image for about so long, one part at least; returns whether it has rows now."""

    def drop(self, digests: list[bytes]) -> None:
        """Drops the rows of images."""


class ImageWork:
    """The encoding of one engine's images.

    Steps earn encoding its share of their time. It is spent behind steps that are not longer than most: the longest
    gaps between two tokens of a stream are then those that they are without images, or LONG steps and what the mean
    step earns, one step at least.
    """

    def __init__(
        self, books: ImageBooks, rows: ImageRows, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`share`: of the steps' time that encoding between them may take."""
        self._books = books
        self._rows = rows
        self._share = share
        self._clock = clock
        self._mean_s = 0.0  # of the last steps
        self._earned_s = 0.0  # and not spent; less than 0 after a part that took longer than was expected

    def clear(self) -> None:
        """Drops the rows of all images that no request waits for."""
        self._rows.drop(self._books.clear())

    def advance(self, step_s: float | None) -> None:
        """Encodes what is wanted next, behind a step that took `step_s`; None: no request is computed."""
        image = self._books.next
        if step_s is not None:
            self._mean_s += (step_s - self._mean_s) * (MEAN_WEIGHT if self._mean_s else 1.0)
        if image is None:
            self._earned_s = min(self._earned_s, 0.0)
            return
        seconds = ALONE_S if step_s is None else self._earn(step_s)
        if seconds is None:
            return
        start = self._clock()
        try:
            is_done = self._rows.advance(image, seconds)
        except Exception:
            logger.exception("an image cannot be encoded; the requests that bring it will fail")
            is_done = True  # the step that needs its rows tries once more, and they are dropped as others are
        finally:
            if step_s is not None:
                self._earned_s -= self._clock() - start
        if is_done:
            self._rows.drop(self._books.encoded(image))

    def _earn(self, step_s: float) -> float | None:
        """Adds the share of a step; returns for how long to encode behind it, or None if nothing is computed."""
        part_s = self._rows.part_s
        most_s = max(max(1.0, self._share) * self._mean_s, part_s)  # a long step, and a long wait, earn no more
        self._earned_s = min(self._earned_s + self._share * step_s, most_s)
        is_long = step_s > LONG * self._mean_s
        return None if is_long or self._earned_s < part_s else self._earned_s
