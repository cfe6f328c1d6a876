"""Images of each slot: rows that a vision tower computes, in the place of those that the model has for ids, and what
rotary positions they have.

Takes slots and plans, not requests. Rows are kept by digest, so that an image that comes again is not computed again;
`engine.scheduler.images` decides which.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.images import Grid, PromptImage
from sluice_server.engine.plan import Placement, StepPlan
from sluice_server.engine.worker.slots.embeds import Given
from sluice_server.engine.worker.slots.image_positions import ImagePositions, positions_of

PART_WEIGHT = 0.2  # of a part in the mean of the last ones


class ImageEncoding(Protocol):
    """An image that is being encoded.

    Attributes:
        rows: float32 [tokens, width]; None until all parts are computed.
    """

    rows: Tensor | None

    def advance(self) -> bool:
        """Computes the next part; returns whether it was the last."""


class ImageEncoder(Protocol):
    """What computes rows."""

    @property
    def width(self) -> int:
        """Numbers of a token's row."""

    def begin(self, pixels: Tensor, grid: Grid) -> ImageEncoding:
        """Begins to encode an image: float32 numbers in the model's order, of so many rows and columns of tokens."""


class EncoderCache:
    """The rows of images, until they are dropped, and the image that is being encoded."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self.num_encoded = self.num_found = 0  # images since start; found: when a step began to read one
        self.busy_s = 0.0  # spent on encoding
        self.part_s = 0.0  # mean of the last parts
        self._encoder = encoder
        self._rows: dict[bytes, Tensor] = {}
        self._begun: tuple[bytes, ImageEncoding] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row."""
        return 4 * self._encoder.width

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Encodes an image for about so long, one part at least; returns whether it has rows now."""
        begun = now = time.monotonic()
        try:
            while True:
                start = now
                is_done = self._advance(image)
                now = time.monotonic()
                self.part_s += (now - start - self.part_s) * (PART_WEIGHT if self.part_s else 1.0)
                if is_done or now - begun + self.part_s > seconds:
                    return is_done
        finally:
            self.busy_s += time.monotonic() - begun

    def _advance(self, image: PromptImage) -> bool:
        """Computes the next part of an image; returns whether it has rows now."""
        if image.digest in self._rows:
            return True
        begun = self._begun
        if begun is None or begun[0] != image.digest:
            begun = image.digest, self._encoder.begin(_pixels(image), image.grid)
        self._begun = None  # an image whose part fails begins anew
        if not begun[1].advance():
            self._begun = begun
            return False
        assert begun[1].rows is not None
        self._rows[image.digest] = begun[1].rows
        self.num_encoded += 1
        return True

    def drop(self, digests: Iterable[bytes]) -> None:
        """Drops the rows of images."""
        for digest in digests:
            self._rows.pop(digest, None)

    def rows(self, image: PromptImage) -> Tensor:
        """Returns the rows of an image, float32 [tokens, width]; encodes it at once where that was not done before."""
        self.num_found += image.digest in self._rows
        self.advance(image, math.inf)
        return self._rows[image.digest]


def _pixels(image: PromptImage) -> Tensor:
    return torch.frombuffer(bytearray(image.pixels), dtype=torch.float32)


class SlotImages:
    """Images by slot, for the slots whose requests brought any."""

    def __init__(self, cache: EncoderCache | None) -> None:
        """`cache`: None for a model without a vision tower, whose requests bring none."""
        self._cache = cache
        self._images: dict[int, tuple[PromptImage, ...]] = {}
        self._positions: dict[int, ImagePositions] = {}  # those that were asked for

    def changes_by(self, placement: Placement) -> bool:
        """Returns whether the slot's former sequence has images, or the new one."""
        return placement.slot in self._images or bool(placement.images)

    def reset(self, placement: Placement) -> None:
        """Replaces those of the slot's former sequence."""
        self._images.pop(placement.slot, None)
        self._positions.pop(placement.slot, None)
        if placement.images:
            self._images[placement.slot] = placement.images

    def given(self, plan: StepPlan) -> Given:
        """Returns the rows that the plan's tokens take."""
        return list(self._given(plan)) if self._images else []

    def turned(self, plan: StepPlan) -> Given:
        """Returns positions int64 [3, N] of the plan's tokens that follow or are an image, for a model with positions
        in three directions."""
        found: Given = []
        if not self._images:
            return found
        ends = itertools.accumulate(plan.query_lens)
        for slot, start, num, end in zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True):
            images = self._images.get(slot)
            if images:
                if slot not in self._positions:
                    self._positions[slot] = positions_of(images)
                found.append((end - num, torch.from_numpy(self._positions[slot].of(start, num))))
        return found

    def _given(self, plan: StepPlan) -> Iterator[tuple[int, Tensor]]:
        assert self._cache is not None, "requests bring images only to a model that takes them"
        ends = itertools.accumulate(plan.query_lens)
        for slot, start, num, end in zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True):
            for image in self._images.get(slot, ()):
                first, last = max(start, image.first), min(start + num, image.first + image.num_tokens)
                if first < last:
                    yield end - num + first - start, self._cache.rows(image)[first - image.first : last - image.first]
