"""Encodes images between steps, a little at a time, so that requests that decode do not wait for a picture."""

import logging
from typing import Protocol

from sluice_server.engine.images import PromptImage
from sluice_server.engine.scheduler.images import ImageBooks

logger = logging.getLogger(__name__)

ALONE_S = 0.02  # while no request is computed: new ones are looked at so often


class ImageRows(Protocol):
    """Computes and keeps rows of images."""

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Encodes an image for about so long; returns whether it has rows now."""

    def drop(self, digests: list[bytes]) -> None:
        """Drops the rows of images."""


class ImageWork:
    """The encoding of one engine's images."""

    def __init__(self, books: ImageBooks, rows: ImageRows, share: float) -> None:
        """`share`: of a step's time that encoding behind it may take."""
        self._books = books
        self._rows = rows
        self._share = share

    def clear(self) -> None:
        """Drops the rows of all images that no request waits for."""
        self._rows.drop(self._books.clear())

    def advance(self, step_s: float | None) -> None:
        """Encodes what is wanted next, behind a step that took `step_s`; None: no request is computed."""
        image = self._books.next
        if image is None:
            return
        try:
            is_done = self._rows.advance(image, ALONE_S if step_s is None else self._share * step_s)
        except Exception:
            logger.exception("an image cannot be encoded; the requests that bring it will fail")
            self._books.give_up(image)
            return
        if is_done:
            self._rows.drop(self._books.encoded(image))
