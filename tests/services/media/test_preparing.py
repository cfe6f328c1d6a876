"""Pixels that are kept: by what was sent, within their bytes."""

import dataclasses

import msgspec
import pytest

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.media.preparing import PixelCache, PreparedPixels
from sluice_server.services.messages.work import ImageFile


@dataclasses.dataclass
class Counting:
    """Decodes to ten bytes, and refuses the file b"bad"."""

    asked: list[bytes] = dataclasses.field(default_factory=list)

    def prepare(self, data: bytes, field: str, media_type: str = "") -> PreparedPixels:
        """Returns pixels of ten bytes."""
        self.asked.append(data)
        if data == b"bad":
            raise invalid(field, "is bad")
        return PreparedPixels(data, data.ljust(10), (1, 1))


def test_an_image_that_comes_again_is_not_decoded_again() -> None:
    decoder = Counting()
    cache = PixelCache(decoder, max_bytes=25)
    a, b, c = (ImageFile("f", one) for one in (b"a", b"b", b"c"))
    for one in (a, b, a, c, a, b):  # b, the least recently used, is dropped for c
        assert cache.prepare(one).digest == one.data
    assert decoder.asked == [b"a", b"b", b"c", b"b"]
    assert cache.ends == {"prepared": 4, "kept": 2}
    cache.prepare(msgspec.structs.replace(b, media_type="image/png"))  # it may be refused for its type
    assert decoder.asked[-1] == b"b" and len(decoder.asked) == 5


def test_a_refusal_is_not_kept() -> None:
    decoder = Counting()
    cache = PixelCache(decoder)
    for _ in range(2):
        with pytest.raises(ServiceError, match="f: is bad"):
            cache.prepare(ImageFile("f", b"bad"))
    assert len(decoder.asked) == 2 and cache.ends == {"refused": 2}


def test_pixels_larger_than_the_cache_are_not_kept() -> None:
    decoder = Counting()
    cache = PixelCache(decoder, max_bytes=9)
    assert cache.prepare(ImageFile("f", b"a")) == cache.prepare(ImageFile("f", b"a"))
    assert len(decoder.asked) == 2
