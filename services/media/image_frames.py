"""Defines the frames between an image child and its parent: an ImageSetup, then ImageJobs and answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.media.processor import ImageLimits, ImageProcessor


class ImageSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How images are prepared, and the limits of one."""

    memory_bytes: int  # of address space
    processor: ImageProcessor
    limits: ImageLimits


class ImageJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An encoded image, and the media type that it must have; "" for any."""

    data: bytes
    media_type: str = ""


class Prepared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The pixels of an image, float32, in the machine's order of bytes, rows and columns of its tokens, and the digest
    of both."""

    pixels: bytes
    digest: bytes
    grid: tuple[int, int]


class RefusedImage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What is wrong with an image, without the name of its field, and the numbers of a limit."""

    message: str
    details: dict[str, str]


ImageAnswer: TypeAlias = Prepared | RefusedImage
