"""Reads what a checkpoint's preprocessor_config.json says of images. Depends on the standard library only."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import MENDING, Fields, Json, read_json, shown

FILE = "preprocessor_config.json"
MAX_SIDE = 1 << 14
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3  # numbers of Pillow's filters, which files have
_ALWAYS: Mapping[str, Json] = {
    **{"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "rescale_factor": 1 / 255},
}
# What files leave out, by the name of the processor without its ending ("Fast", "Pil").
_ASSUMED: Mapping[str, Mapping[str, Json]] = {
    "CLIPImageProcessor": {
        **_ALWAYS,
        **{"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
        **{"image_mean": [*_CLIP_MEAN], "image_std": [*_CLIP_STD]},
    },
    "SiglipImageProcessor": {
        **_ALWAYS,
        **{"size": {"height": 224, "width": 224}, "do_center_crop": False},
        **{"image_mean": [*_HALF], "image_std": [*_HALF]},
    },
}
_KINDS = {**{name: name for name in _ASSUMED}, "LlavaImageProcessor": "CLIPImageProcessor"}


@dataclasses.dataclass(frozen=True, slots=True)
class ImageProcessor:
    """How the pixels of an image are prepared for a model.

    Attributes:
        side: pixels of a side of what the model takes, a square.
        shortest: the shorter side that an image is resized to, of which the middle is taken; 0: it is resized to the
            square, whatever its shape.
        resample: number of Pillow's filter.
        scale: factor of each number from 0 to 255.
        mean, std: of red, green and blue; subtracted, then divided by.
    """

    side: int
    shortest: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that an image is resized to."""
        if not self.shortest:
            return self.side, self.side
        longer = int(self.shortest * max(width, height) / min(width, height))
        return (self.shortest, longer) if width <= height else (longer, self.shortest)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of one image: bytes as sent, and pixels, as it is and as it is resized."""

    max_bytes: int = 8 << 20
    max_pixels: int = 16 << 20


FILE_LIMITS = ImageLimits()


def read_processor(directory: Path) -> ImageProcessor:
    """Reads a checkpoint directory. Raises ServiceError MODEL_INVALID or UNIMPLEMENTED naming file, field and value."""
    path = directory / FILE
    given = Fields(path, read_json(path))
    named = given.string("image_processor_type", "CLIPImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if named not in _KINDS:
        text = f"image_processor_type {shown(named)} is not supported; supported are {', '.join(_KINDS)}"
        raise unsupported("image_processor_type", text)
    raw = Fields(path, {**_ASSUMED[_KINDS[named]], **given.values})
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not raw.boolean(name, True):
            raise unsupported(name, f"{path}: {name} is false; images are prepared with it")
    if raw.boolean("do_pad", False):
        raise unsupported("do_pad", f"{path}: do_pad is true; images are prepared without padding")
    resample = raw.values.get("resample")
    if resample not in (_BILINEAR, _BICUBIC):
        raise raw.must_be("resample", f"{_BILINEAR} (bilinear) or {_BICUBIC} (bicubic)")
    size, crops = raw.values.get("size"), raw.boolean("do_center_crop", False)
    if crops:
        shortest = _side(raw, "size", size.get("shortest_edge") if isinstance(size, dict) else size)
        side = _square(raw, "crop_size")
        if side > shortest:
            raise raw.wrong("crop_size", f"has sides of {side}, more than size.shortest_edge, {shortest}: {MENDING}")
    else:
        shortest, side = 0, _square(raw, "size")
    scale = raw.values.get("rescale_factor")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise raw.must_be("rescale_factor", "a number above 0, at most 1")
    mean, std = _colours(raw, "image_mean", low=-1e3), _colours(raw, "image_std", low=1e-6)
    return ImageProcessor(side, shortest, int(resample), float(scale), mean, std)


def _square(raw: Fields, name: str) -> int:
    """Returns the side of a square, which files have as one number or as height and width."""
    value = raw.values.get(name)
    sides = (value.get("height"), value.get("width")) if isinstance(value, dict) else (value, value)
    if sides[0] != sides[1]:
        raise raw.must_be(name, "a square: height and width are equal")
    return _side(raw, name, sides[0])


def _side(raw: Fields, name: str, value: Json) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIDE:
        raise raw.must_be(name, f"of sides from 1 to {MAX_SIDE}")
    return value


def _colours(raw: Fields, name: str, low: float) -> tuple[float, float, float]:
    value = raw.values.get(name)
    numbers = [one for one in value if type(one) in (int, float)] if isinstance(value, list) else []
    if len(numbers) != 3 or not all(low <= float(one) <= 1e3 for one in numbers):  # type: ignore[arg-type] # checked
        raise raw.must_be(name, f"three numbers from {low:g} to 1000")
    red, green, blue = (float(one) for one in numbers)  # type: ignore[arg-type] # checked
    return red, green, blue
