"""Decodes images with Pillow and prepares their pixels. What is sent may be hostile: call it in a child process.

The size that a file states is checked before anything is decoded, and only named formats are ever tried.
"""

import io
import warnings
from typing import TypeAlias

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
from sluice_server.services.media.processor import ImageLimits, ImageProcessor

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


def prepare(
    data: bytes, processor: ImageProcessor, limits: ImageLimits, field: str = "image", media_type: str = ""
) -> Pixels:
    """Returns the pixels, [3, side, side], of an encoded image; of an animation its first picture. It must be of the
    media type, where one is given.

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
                size = processor.resized(*image.size)
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
    return _normalised(_middle(image, processor.side), processor)


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


def _middle(image: Image.Image, side: int) -> Image.Image:
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _normalised(image: Image.Image, processor: ImageProcessor) -> Pixels:
    scaled = (np.asarray(image).astype(np.float64) * processor.scale).astype(np.float32)
    mean, std = np.array(processor.mean, np.float32), np.array(processor.std, np.float32)
    return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))
