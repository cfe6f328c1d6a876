"""Block size auto in real processes: what a run saw decides the next start's, and streams stay what they were."""

import shutil
from pathlib import Path

import pytest
from sluice.v1 import inference_pb2

from tests.system.service import serve, spec

HEAD = "def f(x):\n    return x + 1\n" * 8
NUM = 70
# Two engines, which tokenizers choose between by the blocks that they have: all have to name blocks alike.
ROUTED = ("--engines", "2", "--routing", "kv-cost")


def run(folder: Path, *options: str) -> tuple[str, list[str], int]:
    """What a service says of its blocks, its answers to prompts that begin alike, and the tokens that it found."""
    log, texts, num_found = folder / "log", list[str](), 0
    options = ("--block-size", "auto", "--kv-cache-tokens", "16384", *options)
    with (
        log.open("w") as file,
        serve(*options, environment={"XDG_CACHE_HOME": str(folder / "cache")}, log=file) as service,
        service.stub() as stub,
    ):
        for at in range(NUM):
            wanted = inference_pb2.GenerateRequest(spec=spec(f"{HEAD}# {at}\ndef g{at}(y):", 4))
            answer = stub.Generate(wanted, timeout=60)
            texts.append(answer.outputs[0].text)
            num_found += answer.usage.cached_tokens
    return next(line for line in log.read_text().splitlines() if "--block-size" in line), texts, num_found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [pytest.param((), id="one engine", marks=pytest.mark.long), pytest.param(ROUTED, id="routed by what caches hold")],
)
def test_the_next_start_takes_what_the_traffic_asks_for(tmp_path: Path, options: tuple[str, ...]) -> None:
    said, texts, num_found = run(tmp_path, *options)
    assert said == "sluice: --block-size auto takes 32: no run of this model was measured"
    again, same_texts, more_found = run(tmp_path, *options)
    assert again.startswith("sluice: --block-size auto takes 16: it would have saved")
    assert same_texts == texts
    assert more_found >= num_found + 10 * NUM > 10 * NUM


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cache_on_disk_is_not_lost_for_less_than_it_holds(tmp_path: Path) -> None:
    kept = ("--host-cache-bytes", str(4 << 20), "--disk-cache-dir", str(tmp_path / "kept"))
    options = (*kept, "--disk-cache-bytes", str(1 << 30))
    _, texts, num_found = run(tmp_path, *options)
    again, same_texts, more_found = run(tmp_path, *options)
    assert again.startswith(f"sluice: --block-size auto takes 32: {tmp_path}/kept keeps ")
    assert same_texts == texts and more_found > num_found
    shutil.rmtree(tmp_path / "kept")
    third, same_texts, _ = run(tmp_path, *options)
    assert third.startswith("sluice: --block-size auto takes 16: it would have saved")
    assert same_texts == texts
