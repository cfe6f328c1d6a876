"""Reads what a checkpoint's preprocessor_config.json says of images. Needs neither Pillow nor numpy."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from sluice_server.engine.errors import unsupported
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.fields import MENDING, Fields, Json, read_json, shown
from sluice_server.services.media.resizing import Resizing, ToCells, ToMiddle, ToSquare, Within

FILE = "preprocessor_config.json"
MAX_SIDE = 1 << 14
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3  # numbers of Pillow's filters, which files have
_ALWAYS: Mapping[str, Json] = {
    **{"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "rescale_factor": 1 / 255},
}
_OF_CLIP: Mapping[str, Json] = {**_ALWAYS, "image_mean": [*_CLIP_MEAN], "image_std": [*_CLIP_STD]}
_OF_SIGLIP: Mapping[str, Json] = {
    **_ALWAYS,
    **{"size": {"height": 224, "width": 224}, "image_mean": [*_HALF], "image_std": [*_HALF]},
}


@dataclasses.dataclass(frozen=True, slots=True)
class ImageProcessor:
    """How the pixels of an image are prepared for a model.

    Attributes:
        cell: pixels of a side of what is one token.
        patch: pixels of a side of a patch, where pixels are sent patch by patch; 0: colour by colour.
        resample: number of Pillow's filter.
        scale: factor of each number from 0 to 255.
        mean, std: of red, green and blue; subtracted, then divided by.
    """

    resizing: Resizing
    cell: int
    patch: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of one image: bytes as sent, and pixels, as it is and as it is resized."""

    max_bytes: int = 8 << 20
    max_pixels: int = 16 << 20


FILE_LIMITS = ImageLimits()


def read_processor(directory: Path, form: ImageForm) -> ImageProcessor:
    """Reads a checkpoint directory, whose model takes images of this form. Raises ServiceError MODEL_INVALID or
    UNIMPLEMENTED naming file, field and value."""
    path = directory / FILE
    given = Fields(path, read_json(path))
    named = given.string("image_processor_type", "CLIPImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if named not in _KINDS:
        text = f"image_processor_type {shown(named)} is not supported; supported are {', '.join(_KINDS)}"
        raise unsupported("image_processor_type", text)
    assumed, resizing_of = _KINDS[named]
    raw = Fields(path, {**assumed, **given.values})
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not raw.boolean(name, True):
            raise unsupported(name, f"{path}: {name} is false; images are prepared with it")
    if raw.boolean("do_pad", False) and resizing_of is not _within:  # which pads pictures of a batch only
        raise unsupported("do_pad", f"{path}: do_pad is true; images are prepared without padding")
    if raw.values.get("do_pan_and_scan"):
        raise unsupported("do_pan_and_scan", f"{path}: do_pan_and_scan is set; a picture is prepared as one image")
    resample = raw.values.get("resample")
    if resample not in (_BILINEAR, _BICUBIC):
        raise raw.must_be("resample", f"{_BILINEAR} (bilinear) or {_BICUBIC} (bicubic)")
    scale = raw.values.get("rescale_factor")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise raw.must_be("rescale_factor", "a number above 0, at most 1")
    mean, std = _colours(raw, "image_mean", low=-1e3), _colours(raw, "image_std", low=1e-6)
    return ImageProcessor(resizing_of(raw, form), form.cell, form.patch, int(resample), float(scale), mean, std)


def _squares(raw: Fields, form: ImageForm) -> Resizing:
    """Returns how CLIP's and SigLIP's pictures are resized: to the only size that the model takes."""
    size = raw.values.get("size")
    if form.grid is None:
        raise raw.wrong("image_processor_type", f"prepares images of one size, and the model takes any: {MENDING}")
    wanted = form.grid[0] * form.cell
    if not raw.boolean("do_center_crop", False):
        return ToSquare(_wanted(raw, "size", _square(raw, "size"), wanted))
    shortest = _side(raw, "size", size.get("shortest_edge") if isinstance(size, dict) else size)
    side = _wanted(raw, "crop_size", _square(raw, "crop_size"), wanted)
    if side > shortest:
        raise raw.wrong("crop_size", f"has sides of {side}, more than size.shortest_edge, {shortest}: {MENDING}")
    return ToMiddle(shortest, side)


def _cells(raw: Fields, form: ImageForm) -> Resizing:
    """Returns how Qwen's pictures are resized: to whole cells, within bounds of pixels that have two spellings."""
    if not form.patch:
        raise raw.wrong("image_processor_type", f"prepares patches, and the model takes pictures: {MENDING}")
    for name, wanted in (("patch_size", form.patch), ("merge_size", form.cell // form.patch)):
        if raw.values.get(name) != wanted:
            raise raw.must_be(name, f"{wanted}, as config.json says")
    size = raw.values.get("size")
    newer = size if isinstance(size, dict) else {}
    least, most = (
        _pixels(raw, old, raw.values.get(old, newer.get(new)))
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    if least > most:
        raise raw.wrong("min_pixels", f"is {least}, more than max_pixels, {most}: {MENDING}")
    return ToCells(form.cell, least, most)


def _within(raw: Fields, form: ImageForm) -> Resizing:
    """Returns how Pixtral's pictures are resized: to whole cells, with a longest side."""
    if not form.patch:
        raise raw.wrong("image_processor_type", f"prepares patches, and the model takes pictures: {MENDING}")
    if _square(raw, "patch_size") != form.patch:
        raise raw.must_be("patch_size", f"{form.patch}, as config.json says")
    size = raw.values.get("size")
    return Within(form.cell, _side(raw, "size", size.get("longest_edge") if isinstance(size, dict) else size))


_QWEN: Mapping[str, Json] = {
    **_OF_CLIP,
    **{"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "patch_size": 14, "merge_size": 2},
}
# What files leave out, and how sizes are found, by the name of the processor without its ending ("Fast", "Pil").
_KINDS: Mapping[str, tuple[Mapping[str, Json], Callable[[Fields, ImageForm], Resizing]]] = {
    **dict.fromkeys(
        ("CLIPImageProcessor", "LlavaImageProcessor"),
        (
            {
                **_OF_CLIP,
                **{"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            },
            _squares,
        ),
    ),
    "SiglipImageProcessor": (_OF_SIGLIP, _squares),
    "Gemma3ImageProcessor": ({**_OF_SIGLIP, "resample": _BILINEAR}, _squares),
    "Qwen2VLImageProcessor": (_QWEN, _cells),
    "PixtralImageProcessor": ({**_OF_CLIP, "size": {"longest_edge": 1024}, "patch_size": 16}, _within),
}


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


def _wanted(raw: Fields, name: str, side: int, wanted: int) -> int:
    """Returns the side, which must be that of the images that the model takes."""
    if side != wanted:
        raise raw.wrong(name, f"prepares images of {side} pixels a side, and the model takes {wanted}: {MENDING}")
    return side


def _pixels(raw: Fields, name: str, value: Json) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIDE**2:
        raise raw.wrong(name, f"is {shown(value)}; it must be a number of pixels up to {MAX_SIDE**2}: {MENDING}")
    return value


def _colours(raw: Fields, name: str, low: float) -> tuple[float, float, float]:
    value = raw.values.get(name)
    numbers = [one for one in value if type(one) in (int, float)] if isinstance(value, list) else []
    if len(numbers) != 3 or not all(low <= float(one) <= 1e3 for one in numbers):  # type: ignore[arg-type] # checked
        raise raw.must_be(name, f"three numbers from {low:g} to 1000")
    red, green, blue = (float(one) for one in numbers)  # type: ignore[arg-type] # checked
    return red, green, blue
