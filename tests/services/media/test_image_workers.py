"""Child processes that decode images: a bad one fails alone, and costs its process at most."""

import dataclasses
import fcntl
import io

import numpy as np
import psutil
import pytest
from PIL import Image

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.images import digest_of
from sluice_server.services.media.image_workers import PIPE_BYTES, ImageWorkers
from sluice_server.services.media.pixels import prepare
from sluice_server.services.media.preparing import PreparedPixels
from sluice_server.services.media.processor import ImageLimits, ImageProcessor
from sluice_server.services.media.resizing import ToMiddle
from sluice_server.services.tokenizer.child_pool import CpuTimeLimit

PROCESSOR = ImageProcessor(ToMiddle(42, 28), 7, 0, 3, 1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))


def png(width: int, height: int) -> bytes:
    """Returns an image that compresses well."""
    out = io.BytesIO()
    values = np.broadcast_to(np.arange(width, dtype=np.uint8)[None, :, None], (height, width, 3))
    Image.fromarray(values).save(out, "PNG")
    return out.getvalue()


def refused(workers: ImageWorkers, data: bytes, media_type: str = "") -> str:
    """Returns the message with which an image is refused."""
    with pytest.raises(ServiceError) as caught:
        workers.prepare(data, "messages[0].image", media_type)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "messages[0].image")
    return caught.value.message


def test_pixels_are_those_of_this_process_and_errors_name_the_field() -> None:
    workers = ImageWorkers(PROCESSOR)
    try:
        data = png(60, 50)
        expected = prepare(data, PROCESSOR, ImageLimits()).pixels.tobytes()
        assert workers.prepare(data, "image") == PreparedPixels(digest_of((4, 4), expected), expected, (4, 4))
        assert refused(workers, b"no") == "messages[0].image: is no image in one of the formats PNG, JPEG, WEBP, GIF"
        assert refused(workers, data[:-40]).startswith("messages[0].image: cannot be decoded: ")
        assert workers.prepare(data, "image", "image/png").pixels == expected
        assert "is image/png, and its media type says 'image/jpeg'" in refused(workers, data, "image/jpeg")
    finally:
        workers.close()


def test_pixels_come_through_a_pipe_that_holds_them() -> None:
    workers = ImageWorkers(dataclasses.replace(PROCESSOR, resizing=ToMiddle(140, 140)))
    before = {child.pid for child in psutil.Process().children()}
    try:
        assert len(workers.prepare(png(60, 50), "image").pixels) == 3 * 140 * 140 * 4
        (child,) = [one for one in psutil.Process().children() if one.pid not in before]
        with open(f"/proc/{child.pid}/fd/1", "wb") as answers:
            assert fcntl.fcntl(answers, fcntl.F_GETPIPE_SZ) == PIPE_BYTES
    finally:
        workers.close()


def test_an_image_that_takes_too_much_memory_fails_alone() -> None:
    workers = ImageWorkers(PROCESSOR, memory_bytes=300 << 20)
    try:
        assert "in the memory that an image may take" in refused(workers, png(4096, 4096))
        assert workers.prepare(png(40, 40), "image")
    finally:
        workers.close()


def test_an_image_that_takes_too_long_fails_alone() -> None:
    workers = ImageWorkers(PROCESSOR, patience=CpuTimeLimit(job_s=0.02))
    try:
        assert "within 0.02 s" in refused(workers, png(4096, 4096))
        assert workers.prepare(png(2, 2), "image")
    finally:
        workers.close()
