"""Pixels of images: equal to those that transformers prepares with Pillow; what is no image is refused by name."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image, ImageOps

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.services.media.pixels import Pixels, prepare
from sluice_server.services.media.processor import ImageLimits, ImageProcessor, read_processor
from sluice_server.services.media.resizing import ToMiddle

CLIP: dict[str, Any] = {
    **{"size": {"shortest_edge": 42}, "crop_size": {"height": 28, "width": 28}, "do_center_crop": True},
    "image_processor_type": "CLIPImageProcessor",
}
SIGLIP: dict[str, Any] = {"size": {"height": 28, "width": 28}, "image_processor_type": "SiglipImageProcessor"}
FORM = ImageForm(token_id=9, cell=7, most_tokens=16, grid=(4, 4))
OF_CLIP = ImageProcessor(ToMiddle(42, 28), 7, 0, 3, 1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Returns an image with different numbers everywhere."""
    bands = np.random.default_rng(width * height).integers(0, 256, (height, width, 4), np.uint8)
    made = Image.fromarray(bands, "RGBA")
    return made if mode == "RGBA" else made.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:  # noqa: ANN401 # of Pillow
    """Returns an image as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def rotated(kind: int) -> bytes:
    """Returns a JPEG whose EXIF data says how it is turned."""
    image = picture(50, 31)
    exif = image.getexif()
    exif[0x0112] = kind
    return encoded(image, "JPEG", exif=exif)


def sixteen_bits() -> bytes:
    """Returns a PNG of 16 bits a pixel."""
    values = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 50
    return encoded(Image.fromarray(values))


def animated() -> bytes:
    """Returns a GIF of three pictures."""
    return encoded(picture(40, 30), "GIF", save_all=True, append_images=[picture(41, 30), picture(42, 30)])


IMAGES: dict[str, bytes] = {
    **{
        f"{width} by {height}": encoded(picture(width, height))
        for width, height in ((28, 28), (1, 1), (31, 97), (97, 31))
    },
    **{mode: encoded(picture(45, 33, mode)) for mode in ("L", "1", "P", "RGBA")},
    "LA": encoded(picture(45, 33, "L").convert("LA")),
    "transparent": encoded(picture(45, 33, "P"), transparency=3),
    "CMYK": encoded(picture(45, 33, "CMYK"), "JPEG"),
    "16 bits": sixteen_bits(),
    "animated": animated(),
    "webp": encoded(picture(45, 33, "RGBA"), "WEBP", lossless=True),
    **{f"turned {kind}": rotated(kind) for kind in (3, 6, 7)},
}


def read(path: Path, fields: dict[str, Any], form: ImageForm | None = None) -> ImageProcessor:
    """Returns the processor of a checkpoint with these fields."""
    (path / "preprocessor_config.json").write_text(json.dumps(fields))
    return read_processor(path, form or FORM)


def reference(data: bytes, kind: Any, fields: dict[str, Any], path: Path) -> Pixels:  # noqa: ANN401 # untyped
    """Returns the pixels that transformers prepares."""
    pixels: Pixels = preprocessed(data, kind, fields, path)[0][0]
    return pixels


def preprocessed(data: bytes, kind: Any, fields: dict[str, Any], path: Path) -> tuple[Pixels, Any]:  # noqa: ANN401
    """Returns the pixels of a batch of one that transformers prepares, and the sizes that it gives, if any."""
    (path / "image").write_bytes(data)
    named = {name: value for name, value in fields.items() if name != "image_processor_type"}
    with Image.open(path / "image") as opened:
        found: Any = kind(**named)(ImageOps.exif_transpose(opened))
    sizes = np.asarray(found["image_grid_thw"][0]).tolist() if "image_grid_thw" in found else None
    return np.asarray(found["pixel_values"]), sizes


ORACLES: dict[str, tuple[dict[str, Any], str]] = {
    "clip": (CLIP, "CLIPImageProcessorPil"),
    "siglip": (SIGLIP, "SiglipImageProcessorPil"),
    "gemma3": ({**SIGLIP, "image_processor_type": "Gemma3ImageProcessor"}, "Gemma3ImageProcessorPil"),
}


@pytest.mark.parametrize("kind", list(ORACLES))
@pytest.mark.parametrize("name", list(IMAGES))
def test_pixels_equal_transformers(name: str, kind: str, tmp_path: Path) -> None:
    fields, oracle = ORACLES[kind][0], getattr(transformers, ORACLES[kind][1])
    got, grid = prepare(IMAGES[name], read(tmp_path, fields), ImageLimits())
    want = reference(IMAGES[name], oracle, fields, tmp_path)
    assert got.shape == want.shape == (3, 28, 28) and grid == (4, 4)
    assert float(np.abs(got - want).max()) < 1e-5
    assert got.flags.c_contiguous


QWEN: dict[str, Any] = {
    **{"patch_size": 7, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 70 * 70},
    "image_processor_type": "Qwen2VLImageProcessor",
}
OF_CELLS = ImageForm(token_id=9, cell=14, most_tokens=25, patch=7)


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("name", list(IMAGES))
def test_patches_equal_transformers(name: str, spelling: str, tmp_path: Path) -> None:
    fields = QWEN
    if spelling == "new":
        fields = {one: value for one, value in QWEN.items() if not one.endswith("_pixels")}
        fields["size"] = {"shortest_edge": QWEN["min_pixels"], "longest_edge": QWEN["max_pixels"]}
    got, grid = prepare(IMAGES[name], read(tmp_path, fields, OF_CELLS), ImageLimits())
    want, sizes = preprocessed(IMAGES[name], transformers.Qwen2VLImageProcessorPil, fields, tmp_path)
    assert sizes == [1, 2 * grid[0], 2 * grid[1]] and 4 <= grid[0] * grid[1] <= 25
    pairs = want.reshape(len(got), 3, 2, 49)  # each patch twice in time
    assert got.shape == (4 * grid[0] * grid[1], 147) and np.array_equal(pairs[:, :, 0], pairs[:, :, 1])
    assert float(np.abs(got - pairs[:, :, 0].reshape(got.shape)).max()) < 1e-5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"patch_size": 14}, "patch_size is 14; it must be 7, as config.json says"),
        ({"merge_size": 4}, "merge_size is 4; it must be 2"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"max_pixels": 700}, "min_pixels is 784, more than max_pixels, 700"),
        ({"image_processor_type": "CLIPImageProcessor"}, "prepares images of one size, and the model takes any"),
    ],
    ids=str,
)
def test_files_of_patches_that_are_not_supported_are_refused_by_name(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ServiceError) as caught:
        read(tmp_path, {**QWEN, **fields}, OF_CELLS)
    assert says in caught.value.message


PIXTRAL: dict[str, Any] = {
    **{"patch_size": {"height": 7, "width": 7}, "size": {"longest_edge": 60}, "do_pad": True},
    "image_processor_type": "PixtralImageProcessor",
}


@pytest.mark.parametrize("name", list(IMAGES))
def test_patches_of_pictures_equal_transformers(name: str, tmp_path: Path) -> None:
    got, grid = prepare(IMAGES[name], read(tmp_path, PIXTRAL, OF_CELLS), ImageLimits())
    merged = {**PIXTRAL, "patch_size": {"height": 14, "width": 14}}  # as the model's processor asks for
    (want,), _ = preprocessed(IMAGES[name], transformers.PixtralImageProcessorPil, merged, tmp_path)
    assert want.shape == (3, 14 * grid[0], 14 * grid[1]) and max(grid) <= 5
    parts = got.reshape(*grid, 2, 2, 3, 7, 7).transpose(4, 0, 2, 5, 1, 3, 6).reshape(want.shape)
    assert float(np.abs(parts - want).max()) < 1e-5


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"patch_size": 14}, "patch_size is 14; it must be 7"), ({"size": {"height": 60}}, "size"), ({"size": 0}, "size")],
    ids=str,
)
def test_files_of_pictures_that_are_not_supported_are_refused_by_name(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ServiceError) as caught:
        read(tmp_path, {**PIXTRAL, **fields}, OF_CELLS)
    assert says in caught.value.message


def test_a_strip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="has 401 by 2 pixels; the longer side may have 200 times the shorter"):
        prepare(encoded(picture(401, 2)), read(tmp_path, QWEN, OF_CELLS), ImageLimits())


def chunk(kind: bytes, body: bytes) -> bytes:
    """Returns a part of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *more: bytes) -> bytes:
    """Returns a PNG that states a size and holds nothing of it."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no image in one of the formats PNG, JPEG, WEBP, GIF"),
    "html": (b"<!doctype html><p>no.png", "no image in one of the formats"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in one of the formats"),
    "tiff": (encoded(picture(8, 8), "TIFF"), "no image in one of the formats"),
    "bmp": (encoded(picture(8, 8), "BMP"), "no image in one of the formats"),
    "no pixels": (png(0, 5), "no image in one of the formats"),
    "lying header": (png(65_535, 65_535), "has more than 16777216 pixels"),
    "large header": (png(5000, 4000), "has 5000 by 4000 pixels; at most 16777216 in all"),
    "strip": (encoded(picture(30_000, 1)), "is resized to 1260000 by 42 pixels"),
    "upright strip": (encoded(picture(1, 10_000)), "is resized to 42 by 420000 pixels"),
    "truncated": (encoded(picture(64, 64), "JPEG")[:-200], "cannot be decoded"),
    "nothing behind the header": (png(8, 8), "cannot be decoded"),
    "text bomb": (png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * (80 << 20)))), "cannot be decoded"),
    "too long": (b"\0" * ((8 << 20) + 1), "has 8388609 bytes; at most 8388608"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_images_are_refused_by_name(name: str) -> None:
    data, says = BAD[name]
    with pytest.raises(ServiceError) as caught:
        prepare(data, OF_CLIP, ImageLimits(), "messages[0].image")
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "messages[0].image"
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"image_processor_type": "FuyuImageProcessor"},
            "CLIPImageProcessor, LlavaImageProcessor, SiglipImageProcessor",
        ),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "prepares patches, and the model takes pictures"),
        ({"do_rescale": False}, "do_rescale is false"),
        ({"do_pad": True}, "do_pad is true"),
        ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, "do_pan_and_scan is set"),
        ({"resample": 0}, "resample is 0"),
        ({"size": {"longest_edge": 42}}, "size"),
        ({"size": 0}, "size"),
        ({"crop_size": {"height": 28, "width": 14}}, "a square"),
        ({"crop_size": 43}, "prepares images of 43 pixels a side, and the model takes 28"),
        ({"size": {"shortest_edge": 27}}, "more than size.shortest_edge, 27"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_mean": [0.5]}, "three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "three numbers"),
    ],
    ids=str,
)
def test_files_that_are_not_supported_are_refused_by_name(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as caught:
        read(tmp_path, {**CLIP, **fields})
    assert says in caught.value.message


@pytest.mark.parametrize("name", ["CLIPImageProcessorFast", "LlavaImageProcessor"])
def test_names_of_the_same_processor_are_known(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, {**CLIP, "image_processor_type": name}) == read(tmp_path, CLIP)
