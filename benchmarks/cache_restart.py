"""The first token of a long prompt before and after its service has started again, with the cache found on disk.

    python -m benchmarks.cache_restart [--shape 135M] [--tokens 10240] [--runs 3] [--form int8]

Each run begins with an empty directory. The prompt is sent to a new service (cold), and once more (in memory). The
service ends as asked and starts again; then it is killed, once it has been idle, and starts again. The figures are the
seconds to the first token, and the share of the prompt's tokens that was found; the ratios are of the same run.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil
from sluice.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.cpu.servers import served
from benchmarks.machine import end_as_asked, median, write
from tests.system.service import spec

IDLE_S = 20.0  # at most, for what is cached to be on disk


def long_context(shape: str, directory: Path, context: int) -> Path:
    """A shape's checkpoint whose context is long enough."""
    for path in served(shape).iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return directory


class Served:
    """A service over a model, with a disk tier in a directory."""

    def __init__(self, model: Path, disk: Path, tokens: int, form: str) -> None:
        command = [sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning"]
        sizes = ["--kv-cache-tokens", str(2 * tokens), "--host-cache-bytes", str(4 << 30)]
        sizes += ["--disk-cache-dir", str(disk), "--disk-cache-bytes", str(8 << 30), "--quantization", form]
        self.process = subprocess.Popen(
            [*command, "--model", str(model), *sizes], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split(" on ")[1].split(",")[0]

    def first_token(self, prompt: list[int]) -> tuple[float, float]:
        """Seconds to the first token of a prompt, and the share of its tokens that was cached."""
        with grpc.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            asked = inference_pb2.StreamGenerateRequest(spec=spec(prompt, 4))
            start, took, cached = time.perf_counter(), 0.0, 0
            for event in stub.StreamGenerate(asked, timeout=600):
                if event.HasField("delta") and not took:
                    took = time.perf_counter() - start
                if event.HasField("accepted"):
                    cached = event.accepted.cached_tokens
        return took, cached / len(prompt)

    def end(self) -> None:
        """Ends it as asked."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def kill(self) -> None:
        """Kills all its processes at once, if they have not ended."""
        if self.process.poll() is not None:
            return
        for process in (*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)):
            process.kill()
        self.process.wait()


def written(disk: Path) -> None:
    """Waits until no more files are written."""
    before, end_s = -1, time.monotonic() + IDLE_S
    while (now := len(list(disk.glob("*.kv")))) != before and time.monotonic() < end_s:
        before = now
        time.sleep(2.0)


def run(model: Path, prompt: list[int], form: str) -> dict[str, float]:
    """The figures of one run."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder)
        for when in ("cold", "restarted", "killed"):
            service = Served(model, disk, len(prompt), form)
            try:
                figures[f"{when}_s"], figures[f"{when}_found"] = service.first_token(prompt)
                if when == "cold":
                    figures["in_memory_s"], _ = service.first_token(prompt)
                    service.end()
                written(disk)
            finally:
                service.kill()
    for when in ("in_memory", "restarted", "killed"):
        figures[f"{when}_over_cold"] = figures[f"{when}_s"] / figures["cold_s"]
    return figures


def main() -> None:
    """Run it and print the figures."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135M")
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--form", default="int8")
    options = parser.parse_args()
    rng = random.Random(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        model = long_context(options.shape, Path(folder), options.tokens + 512)
        prompts = [[rng.randrange(10, 250) for _ in range(options.tokens)] for _ in range(options.runs)]
        runs = [run(model, prompt, options.form) for prompt in prompts]
    figures: dict[str, object] = {name: round(median([one[name] for one in runs]), 3) for name in runs[0]}
    command = f"python -m benchmarks.cache_restart --shape {options.shape} --tokens {options.tokens}"
    write("cache_restart", f"{command} --runs {options.runs} --form {options.form}", figures)


if __name__ == "__main__":
    main()
