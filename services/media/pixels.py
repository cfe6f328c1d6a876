"""Decodes images with Pillow and prepares their pixels. What is sent may be hostile: call it in a child process.

The size that a file states is checked before anything is decoded, and only named formats are ever tried.
"""

import io
import warnings
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import (
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.engine.images import Grid
from sluice_server.services.media.processor import ImageLimits, ImageProcessor
from sluice_server.services.media.resizing import ToMiddle

_FILES = (
    PngImagePlugin.PngImageFile,
    JpegImagePlugin.JpegImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
)
FORMATS = tuple(one.format for one in _FILES if one.format is not None)
Pixels: TypeAlias = npt.NDArray[np.float32]
_TYPES = {one: f"image/{one.lower()}" for one in FORMATS}
_ALIASES = {"JPEG": ("image/jpg", "image/pjpeg")}
_ANY = "application/octet-stream"
_WHITE = (255, 255, 255, 255)


class PreparedImage(NamedTuple):
    """An image as a model takes it.

    Attributes:
        pixels: [3, height, width], or [patches, 3 * side²] where the model takes patches.
        grid: rows and columns of its tokens.
    """

    pixels: Pixels
    grid: Grid


def prepare(
    data: bytes, processor: ImageProcessor, limits: ImageLimits, field: str = "image", media_type: str = ""
) -> PreparedImage:
    """Returns the pixels of an encoded image; of an animation its first picture. It must be of the media type, where
    one is given.

    Raises ServiceError INVALID_ARGUMENT for what is no such image, is damaged, or exceeds a limit.
    """
    if len(data) > limits.max_bytes:
        text = f"has {len(data)} bytes; at most {limits.max_bytes} are allowed"
        raise invalid(field, text, limit=limits.max_bytes, actual=len(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow warns of bombs, and of files that it reads in part
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _check_type(opened.format or "", media_type, field)
                _check(opened.size, "has", limits, field)
                image = _upright(opened)
                size = _resized(processor, image.size, field)
                _check(size, "is resized to", limits, field)
                image = image.resize(size, Image.Resampling(processor.resample))
        except ServiceError:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise invalid(field, f"has more than {limits.max_pixels} pixels", limit=limits.max_pixels) from None
        except UnidentifiedImageError:
            raise invalid(field, f"is no image in one of the formats {', '.join(FORMATS)}") from None
        except MemoryError:
            raise
        except Exception as error:  # decoders raise what they meet: OSError, ValueError, SyntaxError, struct.error
            raise invalid(field, f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from None
    return _ordered(_normalised(_taken(image, processor), processor), processor)


def _check_type(found: str, media_type: str, field: str) -> None:
    """Raises ServiceError for a file of another format than its media type says."""
    named = media_type.lower().partition(";")[0].strip()
    if named not in ("", _ANY, _TYPES[found], *_ALIASES.get(found, ())):
        raise invalid(field, f"is {_TYPES[found]}, and its media type says {media_type[:64]!r}")


def _check(size: tuple[int, int], what: str, limits: ImageLimits, field: str) -> None:
    """Raises ServiceError for a side of no pixels, or too many pixels."""
    width, height = size
    if min(size) < 1:
        raise invalid(field, f"has {width} by {height} pixels; it needs one at least")
    if (actual := width * height) > limits.max_pixels:
        text = f"{what} {width} by {height} pixels; at most {limits.max_pixels} in all are allowed"
        raise invalid(field, text, limit=limits.max_pixels, actual=actual)


def _upright(opened: Image.Image) -> Image.Image:
    """Returns the image in red, green and blue, turned as its EXIF data says, on white where it is transparent."""
    image = ImageOps.exif_transpose(opened)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, _WHITE), over).convert("RGB")
    return image.convert("RGB")


def _resized(processor: ImageProcessor, size: tuple[int, int], field: str) -> tuple[int, int]:
    try:
        return processor.resizing.resized(*size)
    except ValueError as error:
        raise invalid(field, str(error)) from None


def _taken(image: Image.Image, processor: ImageProcessor) -> Image.Image:
    """Returns the part of a resized image that the model gets."""
    if not isinstance(processor.resizing, ToMiddle):
        return image
    side = processor.resizing.side
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _normalised(image: Image.Image, processor: ImageProcessor) -> Pixels:
    """Returns pixels [3, height, width], each of the 256 numbers of a colour as the model takes it."""
    scaled = (np.arange(256, dtype=np.float64) * processor.scale).astype(np.float32)
    mean, std = np.array(processor.mean, np.float32), np.array(processor.std, np.float32)
    found = np.asarray(image)
    normalised = np.empty((3, *found.shape[:2]), np.float32)
    for colour in range(3):
        np.take((scaled - mean[colour]) / std[colour], found[..., colour], out=normalised[colour], mode="clip")
    return normalised


def _ordered(pixels: Pixels, processor: ImageProcessor) -> PreparedImage:
    """Returns pixels [3, height, width] in the model's order: as they are, or those of each token's patches one after
    the other."""
    _, height, width = pixels.shape
    cell, patch = processor.cell, processor.patch
    grid = height // cell, width // cell
    if not patch:
        return PreparedImage(np.ascontiguousarray(pixels), grid)
    num = cell // patch
    parts = pixels.reshape(3, grid[0], num, patch, grid[1], num, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    return PreparedImage(np.ascontiguousarray(parts).reshape(-1, 3 * patch * patch), grid)
