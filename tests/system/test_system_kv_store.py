"""A store of a service: blocks outlive the service, and the store's end under load costs no token.

With a host tier the store is a level of the tiers, and is read while others are computed; without, it is asked like
another engine. Long: `pytest -m long`. Stores and links are tested in `services/kvstore`.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sluice.v1 import inference_pb2

from benchmarks.streams import at_phase, stream_all, varied
from tests.faults.test_faults_kill import check_undisturbed
from tests.system.service import Service, serve, spec

WAYS = {"beside": (), "level": ("--host-cache-bytes", str(1 << 24))}
PROMPTS = [[first, *range(100, 740)] for first in range(11, 17)]


@contextlib.contextmanager
def store(path: Path) -> Iterator["subprocess.Popen[str]"]:
    sizes = ("--memory-bytes", str(1 << 25), "--disk-dir", str(path.parent / "disk"), "--disk-bytes", str(1 << 28))
    command = [sys.executable, "-m", "sluice_server", "kvstore", "--listen", str(path), *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "listens" in process.stdout.readline()
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def service(path: Path, *more: str) -> Iterator[Service]:
    shared = ("--shared-cache-bytes", str(1 << 26), "--kv-store", str(path), "--dtype", "float32")
    with serve(*shared, "--kv-cache-tokens", "16384", *more) as running:
        yield running


def answer(running: Service, ids: list[int]) -> tuple[str, int]:
    """The text of a prompt, and how many of its tokens were cached."""
    with running.stub() as stub:
        wanted = spec(ids, 12, seed=7, temperature=0.9)
        found = stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60)
        return found.outputs[0].text, found.usage.cached_tokens


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_blocks_outlive_the_service_and_the_store(tmp_path: Path, way: str) -> None:
    path, more = tmp_path / "store", WAYS[way]
    found: list[list[int]] = []
    with store(path):
        with service(path, *more) as first:
            texts = [answer(first, ids) for ids in PROMPTS]
            assert [cached for _, cached in texts] == [0] * len(PROMPTS)
        with service(path, *more) as second:  # in the memory of the store
            again = [answer(second, ids) for ids in PROMPTS]
            assert [text for text, _ in again] == [text for text, _ in texts]
            found.append([cached for _, cached in again])
    with store(path), service(path, *more) as third:  # on disk
        again = [answer(third, ids) for ids in PROMPTS]
        assert [text for text, _ in again] == [text for text, _ in texts]
        found.append([cached for _, cached in again])
    # No request waits for a block longer than computing it takes, which is not long here.
    assert max(found[0]) >= 640 and max(found[1]) > 0, found


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_is_killed_under_load_costs_no_token(tmp_path: Path, way: str) -> None:
    path, specs = tmp_path / "store", varied(8, 60)
    with service(path, "--engines", "2", *WAYS[way]) as running:
        undisturbed = stream_all(running.address, specs)
        with store(path) as process:
            check_undisturbed(stream_all(running.address, specs, at_phase("decode", 3, process.kill)), undisturbed)
        with store(path):
            check_undisturbed(stream_all(running.address, specs), undisturbed)
