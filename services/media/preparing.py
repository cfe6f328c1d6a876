"""Prepares the pixels of images, and keeps those that were prepared last: a conversation sends the same ones again.

Thread-safe; images are decoded by `ImageWorkers`, elsewhere.
"""

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import Grid
from sluice_server.services.messages.work import ImageFile

KEPT_BYTES = 64 << 20  # of pixels: 47 images of 336 by 336


class PreparedPixels(NamedTuple):
    """The pixels of an image, rows and columns of its tokens, and the digest of both."""

    digest: bytes
    pixels: bytes
    grid: Grid


class Decoder(Protocol):
    """Decodes images."""

    def prepare(self, data: bytes, field: str, media_type: str = "") -> PreparedPixels:
        """Returns the pixels of an encoded image. Raises ServiceError naming `field`."""


class PixelCache:
    """Pixels by SHA-256 of the file, `max_bytes` at most."""

    def __init__(self, decoder: Decoder, max_bytes: int = KEPT_BYTES) -> None:
        self.counts: Counter[str] = Counter()  # images by what happened to them
        self.busy_s = 0.0  # spent on decoding
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, str], PreparedPixels] = OrderedDict()  # the least recently used first

    @property
    def ends(self) -> Mapping[str, int]:
        """The images so far by what happened: prepared, kept, refused."""
        return dict(self.counts)

    def prepare(self, image: ImageFile) -> PreparedPixels:
        """Returns the pixels of an image. Raises ServiceError naming its field."""
        key = hashlib.sha256(image.data).digest(), image.media_type
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.counts["kept"] += 1
                return found
        start = time.monotonic()
        try:
            found = self._decoder.prepare(image.data, image.field, image.media_type)
        except ServiceError:
            self._count("refused", start)
            raise
        self._count("prepared", start)
        self._keep(key, found)
        return found

    def _count(self, what: str, start: float) -> None:
        with self._lock:
            self.counts[what] += 1
            self.busy_s += time.monotonic() - start

    def _keep(self, key: tuple[bytes, str], found: PreparedPixels) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self._num_bytes += len(found.pixels)
            while self._num_bytes > self._max_bytes and self._kept:
                self._num_bytes -= len(self._kept.popitem(last=False)[1].pixels)
