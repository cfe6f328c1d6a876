"""Decides which images are encoded next, and which rows are dropped for them. Pure: digests in, digests out.

A request waits for admission until the rows of its images are there, but for those whose tokens are all in the prefix
cache. Admission goes through the queue in the policy's order and claims each request's images, as far as their rows fit
together with those that running prompts still read. What is claimed is never dropped, so a request's own images do not
displace each other; the first request's always fit, whatever their size.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sluice_server.engine.images import PromptImage


class ImageBooks:
    """The images with rows, and those that are wanted."""

    def __init__(self, max_bytes: int, row_bytes: int, *, are_whole: bool = False) -> None:
        """`row_bytes`: of a token's row. `are_whole`: an image's tokens are computed in one step."""
        self.are_whole = are_whole
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # bytes by digest, the least recently used first
        self._claimed: dict[bytes, int] = {}  # bytes by digest
        self._wanted: dict[bytes, PromptImage] = {}  # by digest, the first to be encoded first

    @property
    def next(self) -> PromptImage | None:
        """The image to encode now."""
        return next(iter(self._wanted.values()), None)

    def begin(self, read: Iterable[PromptImage]) -> None:
        """Begins a look at the queue; `read` are the images whose rows running prompts still need."""
        self._wanted.clear()
        self._claimed = {image.digest: self._size(image) for image in read}

    def await_rows(self, images: Sequence[PromptImage]) -> bool:
        """Whether a request must wait for rows. Claims its images if they fit, and wants those without rows."""
        own = {image.digest: image for image in images}
        if not own:
            return False
        more = sum(self._size(image) for digest, image in own.items() if digest not in self._claimed)
        if self._claimed and sum(self._claimed.values()) + more > self._max_bytes:
            return True
        for digest, image in own.items():
            self._claimed[digest] = self._size(image)
            if digest in self._kept:
                self._kept.move_to_end(digest)
            else:
                self._wanted[digest] = image
        return any(digest in self._wanted for digest in own)

    def encoded(self, image: PromptImage) -> list[bytes]:
        """Records that an image has rows; returns the digests whose rows are dropped for it."""
        self._wanted.pop(image.digest, None)
        if image.digest not in self._kept:
            self._kept[image.digest] = self._size(image)
            self._num_bytes += self._size(image)
        dropped: list[bytes] = []
        if self._num_bytes <= self._max_bytes:
            return dropped  # before the books are copied: they may hold thousands
        for digest in list(self._kept):
            if self._num_bytes <= self._max_bytes:
                break
            if digest not in self._claimed and digest != image.digest:
                self._num_bytes -= self._kept.pop(digest)
                dropped.append(digest)
        return dropped

    def clear(self) -> list[bytes]:
        """Forgets the rows that no prompt needs; returns their digests."""
        dropped = [digest for digest in self._kept if digest not in self._claimed]
        for digest in dropped:
            self._num_bytes -= self._kept.pop(digest)
        return dropped

    def check(self) -> None:
        """Asserts that the books add up; for tests and simulation."""
        assert self._num_bytes == sum(self._kept.values())
        assert not self._wanted.keys() & self._kept.keys() and self._wanted.keys() <= self._claimed.keys()

    def _size(self, image: PromptImage) -> int:
        return self._row_bytes * image.num_tokens
