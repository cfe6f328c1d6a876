"""Models of one service that share a GPU, in real processes: each sleeps, gives the device's memory back, and wakes
with the tokens that it had, with its weights on the device, or half of them in memory of the host. Profiles of one."""

import gzip
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.test_gpu_engine import SHAPES
from tests.oracle.checkpoints import make_checkpoint

SETTINGS = ("kv-cache-tokens = 16384", "max-num-seqs = 8", "prefix-caching = false", "gpu-memory-utilization = 0.3")
OFFLOADED = 1_000_000_000  # bytes, of 1.95e9 of layers
LEAST_FREED = {"resident": 2_400_000_000, "offloaded": 1_400_000_000}  # weights; the cache has 0.5e9 beside them
PROMPT, NUM = [*range(3, 60)], 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two models of one shape and different weights."""
    for package in ("zmq", "grpc", "msgspec", "psutil"):
        pytest.importorskip(package, reason=f"a whole service needs {package}")
    from tests.oracle.tokenizers import byte_level_bpe

    folder = tmp_path_factory.mktemp("models")
    lines = ['default = "resident"']
    for seed, name in enumerate(LEAST_FREED):
        (folder / name).mkdir()
        byte_level_bpe(folder / name)
        with torch.device("cuda"):
            make_checkpoint(folder / name, SHAPES["1B"], seed)
        own = [f"weights-offload-bytes = {OFFLOADED}"] if name == "offloaded" else []
        lines += [f"[models.{name}]", f'source = "{folder / name}"', f"[models.{name}.settings]", *SETTINGS, *own]
    torch.cuda.empty_cache()
    file = folder / "models.toml"
    file.write_text("\n".join(lines))
    return file


def used() -> int:
    """Bytes of the device that are taken, by whatever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_models_sleep_and_wake_beside_one_another(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import grpc
    from sluice.v1 import control_pb2

    from tests.system.service import generate, serve, spec, wait_until
    from tests.system.test_system_models import states

    start = time.monotonic()
    with (
        serve("--models", str(models), "--device", "cuda", environment={"TRITON_INTERPRET": "0"}) as service,
        service.stub() as stub,
        service.control() as control,
    ):

        def tokens(name: str) -> list[int]:
            wanted = spec(PROMPT, NUM)
            wanted.model = name
            return [one.id for one in generate(stub, wanted).tokens]

        def say(text: str) -> None:
            with capsys.disabled():
                print(f"{time.monotonic() - start:6.1f} s, {used() / 1e9:5.2f} GB: {text}", flush=True)

        wait_until(lambda: set(states(control).values()) == {"READY"}, 240, "both models serve")
        say("both serve")
        want = {name: tokens(name) for name in LEAST_FREED}
        assert want["resident"] != want["offloaded"]
        for lane, (name, least) in zip(("", "m1-"), LEAST_FREED.items(), strict=True):
            (other,) = set(LEAST_FREED) - {name}
            engine, before = service.children()[f"{lane}engine-0"], used()
            with pytest.raises(grpc.RpcError, match="use level 2"):
                control.SleepModel(control_pb2.SleepModelRequest(model=name, level=1), timeout=60)
            control.SleepModel(control_pb2.SleepModelRequest(model=name, level=2), timeout=60)
            wait_until(lambda: not engine.is_running(), 60, "its engine has ended")  # noqa: B023 # at once
            say(f"{name} sleeps, {(before - used()) / 1e9:.2f} GB freed")
            assert before - used() > least and tokens(other) == want[other]
            woken = time.monotonic()
            assert tokens(name) == want[name] and states(control)[name] == "READY"
            say(f"{name} was woken by a request, which took {time.monotonic() - woken:.2f} s")
            os.kill(service.children()[f"{lane}engine-0"].pid, signal.SIGKILL)
            killed = time.monotonic()
            assert tokens(name) == want[name] and tokens(other) == want[other]
            say(f"{name} had its tokens {time.monotonic() - killed:.2f} s after its engine was killed")
        assert used() < before + (64 << 20)


def test_profiles_of_an_engine_on_a_gpu(models: Path) -> None:
    """The kernels of a step are in a trace, and the allocator's history is JSON that says what was allocated where."""
    import sluice

    from tests.system.service import generate, serve, spec, wait_until
    from tests.system.test_system_models import states

    with (
        serve("--models", str(models), "--device", "cuda", environment={"TRITON_INTERPRET": "0"}) as service,
        service.stub() as stub,
        service.control() as control,
        sluice.Client(service.address) as client,
    ):
        wait_until(lambda: states(control)["resident"] == "READY", 240, "it serves")
        is_over = threading.Event()

        def keep_busy() -> None:
            while not is_over.is_set():
                generate(stub, spec(PROMPT, NUM))

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            found = {
                kind: json.loads(gzip.decompress(b"".join(part.data for part in client.profile(kind, steps=8))))
                for kind in ("torch", "cuda-memory")
            }
        finally:
            is_over.set()
            busy.join()
        kernels = {one["name"] for one in found["torch"]["traceEvents"] if one.get("cat") == "kernel"}
        assert any("attention" in name for name in kernels), sorted(kernels)
        history = found["cuda-memory"]
        assert sum(one["total_size"] for one in history["segments"]) > LEAST_FREED["resident"]
        assert history["device_traces"] and history["segments"][0]["blocks"]
