"""The images of a gateway's requests: those named by digest, and the bytes that open requests hold. Pure."""

import dataclasses
import hashlib
from collections import OrderedDict

import msgspec

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.messages.work import Generate, ImageFile


class ImageStore:
    """The files that were sent last, of `max_bytes` in all, by tenant and SHA-256: a tenant names its own only."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._files: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()  # the least recently used first

    def resolved(self, tenant: str, asked: TranslatedRequest) -> TranslatedRequest:
        """Returns a request with data in the place of digests. Raises ServiceError IMAGE_NOT_FOUND."""
        if not any(one.digest for one in images_of(asked)):
            return asked
        return with_images(asked, tuple(self._found(tenant, one) if one.digest else one for one in images_of(asked)))

    def keep(self, tenant: str, asked: TranslatedRequest) -> None:
        """Keeps the files of a request."""
        for image in images_of(asked):
            if 0 < len(image.data) <= self._max_bytes:
                self._keep((tenant, image.digest or hashlib.sha256(image.data).digest()), image.data)

    def _keep(self, key: tuple[str, bytes], data: bytes) -> None:
        if key not in self._files:
            self._files[key] = data
            self.num_bytes += len(data)
        self._files.move_to_end(key)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._files.popitem(last=False)[1])

    def _found(self, tenant: str, image: ImageFile) -> ImageFile:
        data = self._files.get((tenant, image.digest))
        if data is None:
            field = f"{image.field}.digest"
            text = f"{field}: no image of this SHA-256 is kept here, {image.digest.hex()}: send its data"
            raise ServiceError(Code.NOT_FOUND, "IMAGE_NOT_FOUND", text, field=field)
        return msgspec.structs.replace(image, data=data)


def images_of(asked: TranslatedRequest) -> tuple[ImageFile, ...]:
    """Returns the images of a request."""
    return asked.work.images if isinstance(asked.work, Generate) else ()


def with_images(asked: TranslatedRequest, images: tuple[ImageFile, ...]) -> TranslatedRequest:
    """Returns a request with other files of its images."""
    return dataclasses.replace(asked, work=msgspec.structs.replace(asked.work, images=images))


def held_bytes(asked: TranslatedRequest) -> int:
    """Returns the bytes that a request's images take while it is open; those to fetch count as the largest."""
    return sum(FILE_LIMITS.max_bytes if one.url else len(one.data) for one in images_of(asked))
