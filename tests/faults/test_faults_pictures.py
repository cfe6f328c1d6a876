"""Very many pictures, each unlike the others, of several sizes and formats: what processes hold does not grow."""

import dataclasses
import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sluice.v1 import inference_pb2, types_pb2

from tests.faults.faulty import faults
from tests.faults.growth import growing, sizes
from tests.oracle.image_families import QWEN2_5
from tests.oracle.vision_checkpoints import make_served_llava
from tests.system.service import Service, serve, spec

AT_ONCE = 8
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# So small that all caches are full after the warm-up; the tokenizer keeps 64 MiB of pixels.
OPTIONS = ("--encoder-cache-bytes", str(1 << 20), "--image-store-bytes", str(1 << 20), "--kv-cache-tokens", "8192")
# A process of each kind that holds something of a picture; the children of a tokenizer too.
LEAKING = {"gateway-0", "tokenizer-0", "tokenizer-0/image_child-0", "engine-0"}


@dataclasses.dataclass(frozen=True)
class Load:
    """A model and the pictures that it is sent.

    Attributes:
        sides: the least and the most pixels of a side.
        warm_up: pictures until all caches are full.
        each, rounds: pictures of a round, and rounds.
        most: bytes of growth a picture that are no leak: less than the rows, the pixels or the file of one.
        kept: bytes of a request that a gateway keeps where it leaks.
    """

    make: Callable[[Path], object]
    sides: tuple[int, int]
    warm_up: int
    each: int
    rounds: int
    most: float
    kept: int


def _sized(path: Path) -> None:
    """Pictures of 4 to 64 tokens, which take up to 48 KiB as pixels and 16 KiB as rows."""
    QWEN2_5.make_served(path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_pixels": 64 * 64}))


def _large(path: Path) -> None:
    """Pictures of 64 tokens, which take 588 KiB as pixels and 64 KiB as rows."""
    make_served_llava(path, vision={"image_size": 224, "patch_size": 28}, text={"hidden_size": 256, "head_dim": 64})


LOADS = {
    "short": Load(_large, (100, 200), warm_up=400, each=24, rounds=8, most=16 << 10, kept=64 << 10),
    "ten thousand": Load(_sized, (16, 80), warm_up=4000, each=500, rounds=20, most=1 << 10, kept=8 << 10),
}
LONG = (pytest.mark.long, pytest.mark.timeout(3600))
CASES = ["short", pytest.param("ten thousand", marks=LONG)]
PLANTED = [pytest.param(name, marks=LONG) for name in LOADS]


def request(number: int, sides: tuple[int, int]) -> inference_pb2.GenerateRequest:
    """A request with a picture of its own."""
    rng = random.Random(number)
    size = rng.randint(*sides), rng.randint(*sides), 3
    out, values = io.BytesIO(), np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(values).save(out, FORMATS[number % len(FORMATS)])
    asked = spec("", 2)
    asked.chat.messages.add(role=types_pb2.ROLE_USER).parts.add(image=types_pb2.Image(data=out.getvalue()))
    return inference_pb2.GenerateRequest(spec=asked)


def grown(service: Service, load: Load, rounds: int) -> dict[str, float]:
    """The bytes a picture by which processes have grown that grow, after the warm-up."""
    with service.stub() as stub, ThreadPoolExecutor(AT_ONCE) as threads:

        def send(first: int, num: int) -> None:
            made = (request(number, load.sides) for number in range(first, first + num))
            for response in threads.map(lambda one: stub.Generate(one, timeout=120), made):
                assert response.usage.image_tokens >= 4

        send(0, load.warm_up)
        found = sizes(service, lambda at: send(load.warm_up + at * load.each, load.each), rounds)
    for name, values in found.items():
        print(f"{name}: {' '.join(f'{one / 2**20:.1f}' for one in values)} MiB")
    return {name: rise / load.each for name, rise in growing(found, load.most * load.each).items()}


@pytest.mark.parametrize("name", CASES)
def test_nothing_grows_over_pictures(tmp_path: Path, name: str) -> None:
    load = LOADS[name]
    load.make(tmp_path)
    with serve("--model", str(tmp_path), *OPTIONS) as service:
        assert not grown(service, load, load.rounds)


@pytest.mark.parametrize("name", PLANTED)
def test_processes_that_keep_something_of_each_picture_are_found_out(tmp_path: Path, name: str) -> None:
    """The check finds planted leaks, and no others."""
    load = LOADS[name]
    load.make(tmp_path)
    planted = faults(leak=load.kept, kept_pixels=True, kept_pictures=True, kept_rows=True)
    with serve("--model", str(tmp_path), *OPTIONS, environment=planted) as service:
        assert grown(service, load, min(load.rounds, 5)).keys() == LEAKING
