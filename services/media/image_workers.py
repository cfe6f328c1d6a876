"""Prepares images in child processes that can be killed: a bad image fails its own request only. Thread-safe."""

import msgspec

from sluice_server.engine.errors import invalid
from sluice_server.services.media.image_frames import ImageAnswer, ImageJob, ImageSetup, RefusedImage
from sluice_server.services.media.preparing import PreparedPixels
from sluice_server.services.media.processor import ImageLimits, ImageProcessor
from sluice_server.services.tokenizer.child_pool import ChildPool, CpuTimeLimit, DiedError, OverdueError

MODULE = "sluice_server.services.media.image_child"
MEMORY_BYTES = 1 << 30  # of address space: an idle child maps about 200 MiB, the largest image takes three times 64
PATIENCE = CpuTimeLimit(job_s=5.0)
PIPE_BYTES = 1 << 20  # the most that Linux lets a user's pipe hold by default: pixels of 290 by 290


class ImageWorkers:
    """A pool of at most `num` processes that decode images."""

    def __init__(
        self,
        processor: ImageProcessor,
        limits: ImageLimits | None = None,
        num: int = 1,
        patience: CpuTimeLimit = PATIENCE,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`memory_bytes`: the address space of each process."""
        setup = ImageSetup(memory_bytes, processor, limits or ImageLimits())
        self._children: ChildPool[ImageAnswer] = ChildPool(MODULE, setup, _decode, num, patience, PIPE_BYTES)

    def prepare(self, data: bytes, field: str, media_type: str = "") -> PreparedPixels:
        """Returns the pixels of an encoded image, float32. It must be of the media type, where one is given.

        Raises ServiceError naming `field`.
        """
        try:
            answer = self._children.ask(ImageJob(data, media_type))
        except OverdueError as error:
            text = f"is not decoded within {error.limit_s:g} s of computing time: send a smaller one"
            raise invalid(field, text, limit=error.limit_s) from error
        except DiedError as error:
            raise invalid(
                field, "cannot be decoded in the memory that an image may take: send a smaller one"
            ) from error
        if isinstance(answer, RefusedImage):
            raise invalid(field, answer.message, **answer.details)
        return PreparedPixels(answer.digest, answer.pixels, answer.grid)

    def close(self) -> None:
        """Ends the children. No image may be in work."""
        self._children.close()


def _decode(answer: bytes) -> ImageAnswer:
    decoded: ImageAnswer = msgspec.msgpack.decode(answer, type=ImageAnswer)
    return decoded
