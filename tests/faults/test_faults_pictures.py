"""Ten thousand pictures, each unlike the others: what processes hold does not grow."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sluice.v1 import inference_pb2, types_pb2

from tests.faults.faulty import faults
from tests.faults.test_faults_soak import memory
from tests.oracle.vision_checkpoints import make_served_llava
from tests.system.service import Service, serve, spec

AT_ONCE = 8
WARM_UP = 4000  # pictures: every cache is full, with 37 KiB of pixels, 4 KiB of rows and 1 KiB of file each
MIB_PER_10K = 12.0  # all rows of so many are 40 MiB, all pixels 370 MiB
OPTIONS = ("--encoder-cache-bytes", str(1 << 20), "--image-store-bytes", str(1 << 20), "--kv-cache-tokens", "8192")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes pictures of 56 pixels a side as 16 tokens."""
    path = tmp_path_factory.mktemp("llava")
    make_served_llava(path, vision={"image_size": 56, "patch_size": 14})
    return path


def requests(first: int, num: int) -> Iterator[inference_pb2.GenerateRequest]:
    """Requests with one picture each."""
    for number in range(first, first + num):
        out = io.BytesIO()
        values = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(values).save(out, "PNG")
        asked = spec("", 1)
        asked.chat.messages.add(role=types_pb2.ROLE_USER).parts.add(image=types_pb2.Image(data=out.getvalue()))
        yield inference_pb2.GenerateRequest(spec=asked)


def growth(service: Service, num: int) -> dict[str, float]:
    """Growth in MiB per 10,000 pictures after the warm-up, of each process."""
    with service.stub() as stub, ThreadPoolExecutor(AT_ONCE) as threads:

        def send(first: int, num: int) -> None:
            for response in threads.map(lambda one: stub.Generate(one, timeout=120), requests(first, num)):
                assert response.usage.image_tokens == 16

        send(0, WARM_UP)
        before = memory(service)
        send(WARM_UP, num)
        after = memory(service)
    return {name: (after[name] - before[name]) / num * 10_000 for name in before}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_grows_over_ten_thousand_pictures(path: Path) -> None:
    with serve("--model", str(path), *OPTIONS) as service:
        grown = growth(service, 10_000)
    assert all(mib <= MIB_PER_10K for mib in grown.values()), grown


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_engine_that_keeps_the_rows_of_pictures_is_found_out(path: Path) -> None:
    """The check finds a planted leak."""
    with serve("--model", str(path), *OPTIONS, environment=faults(kept_rows=True)) as service:
        grown = growth(service, 3000)
    assert grown["engine-0"] > MIB_PER_10K, grown
