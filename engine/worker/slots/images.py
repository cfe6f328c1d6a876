"""Images of each slot: rows that a vision tower computes, in the place of those that the model has for ids.

Takes slots and plans, not requests. Rows are kept by digest, so that an image that comes again is not computed again.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.images import PromptImage
from sluice_server.engine.plan import Placement, StepPlan
from sluice_server.engine.worker.slots.embeds import Given

CACHE_BYTES = 64 << 20  # of rows that no slot needs: 27 images of 576 tokens of 1,024 numbers


class ImageEncoder(Protocol):
    """What computes rows."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Returns the rows, float32 [tokens, width], of an image's pixels, float32 [3, side, side]."""


class EncoderCache:
    """The rows of the images that were used last, `max_bytes` of them at most and always the last one's."""

    def __init__(self, encoder: ImageEncoder, max_bytes: int = CACHE_BYTES) -> None:
        self.num_encoded = self.num_found = 0  # images since start
        self.busy_s = 0.0  # spent on encoding
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the least recently used first

    def rows(self, image: PromptImage) -> Tensor:
        """Returns the rows of an image, float32 [tokens, width]."""
        found = self._rows.get(image.digest)
        self.num_found += found is not None
        if found is None:
            found = self._rows[image.digest] = self._encode(image)
            self._num_bytes += found.nbytes
            while self._num_bytes > self._max_bytes and len(self._rows) > 1:
                self._num_bytes -= self._rows.popitem(last=False)[1].nbytes
        self._rows.move_to_end(image.digest)
        return found

    def _encode(self, image: PromptImage) -> Tensor:
        numbers = torch.frombuffer(bytearray(image.pixels), dtype=torch.float32)
        side = round((len(numbers) / 3) ** 0.5)
        self.num_encoded += 1
        return self._encoder.encode(numbers.view(3, side, side))


class SlotImages:
    """Images by slot, for the slots whose requests brought any."""

    def __init__(self, cache: EncoderCache | None) -> None:
        """`cache`: None for a model without a vision tower, whose requests bring none."""
        self._cache = cache
        self._images: dict[int, tuple[PromptImage, ...]] = {}

    def reset(self, placement: Placement) -> None:
        """Replaces those of the slot's former sequence."""
        self._images.pop(placement.slot, None)
        if placement.images:
            self._images[placement.slot] = placement.images

    def given(self, plan: StepPlan) -> Given:
        """Returns the rows that the plan's tokens take."""
        return list(self._given(plan)) if self._images else []

    def _given(self, plan: StepPlan) -> Iterator[tuple[int, Tensor]]:
        assert self._cache is not None, "requests bring images only to a model that takes them"
        ends = itertools.accumulate(plan.query_lens)
        for slot, start, num, end in zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True):
            for image in self._images.get(slot, ()):
                first, last = max(start, image.first), min(start + num, image.first + image.num_tokens)
                if first < last:
                    yield end - num + first - start, self._cache.rows(image)[first - image.first : last - image.first]
