"""This engine's decode step and prefill, or those of a bare torch forward; answers one JSON line for each it reads.

    python -m benchmarks.cpu.own_worker SHAPE FORMAT

FORMAT: float32, bfloat16, int8, int4, or bare. A step is all of the engine: scheduler, cache, forward, sampler.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare_forward import BareModel
from benchmarks.cpu.shapes import checkpoint
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.engine.request import EngineRequest, SamplingParams

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
PROMPT = 128
CONTEXT = 1024
SETTINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4+": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "int8+": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


class OwnEngine:
    """Our engine."""

    def __init__(self, directory: Path, form: str) -> None:
        config = EngineConfig(
            device="cpu", max_num_seqs=32, threads=THREADS, kv_cache_tokens=32 * CONTEXT, prefix_caching=False
        )
        for name, value in SETTINGS[form].items():
            config = _with(config, name, value)
        model = read_config(directory)
        built = build_engine(config, model, directory, limits_of(config, model, 1 << 20))
        how = built.computing
        self.about = f"{how.kernels} {how.quantization or how.dtype}, cache in {how.cache_dtype}"
        self._engine, self._count = built.engine, 0

    def decode(self, num: int, steps: int) -> list[float]:
        """Seconds of `steps` steps of `num` sequences."""
        self._add(num, PROMPT, steps + 40)
        running: set[str] = set()
        while len(running) < num:
            running.update(event.request_id for event in self._engine.step().sampled)
        took = [timed(self._engine.step) for _ in range(steps)]
        self._finish()
        return took

    def prefill(self) -> list[float]:
        """Seconds of a prompt of 512 tokens."""
        self._add(1, 512, 1)
        return [timed(self._finish)]

    def _add(self, num: int, prompt: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for i in range(num):
            self._count += 1
            ids = tuple((self._count * 131 + at * 7 + i) % 1000 + 3 for at in range(prompt))
            self._engine.add(EngineRequest(f"{self._count:032x}", ids, params))

    def _finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()


class Bare:
    """Torch and nothing else, keys and values contiguous."""

    about = "torch float32"

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(THREADS)
        self._config = read_config(directory)
        self._source = Checkpoint(directory, torch.float32, torch.device("cpu"))

    def decode(self, num: int, steps: int) -> list[float]:
        """Seconds of `steps` steps of `num` sequences."""
        model = BareModel(self._config, self._source, num, CONTEXT)
        ids, took = torch.zeros(num, dtype=torch.int64), []
        for i in range(steps):
            start = CLOCK()
            ids = model.step(ids, PROMPT + i)
            took.append(CLOCK() - start)
        return took

    def prefill(self) -> list[float]:
        """It has none."""
        return []


def _with(config: EngineConfig, name: str, value: str) -> EngineConfig:
    changed: dict[str, Any] = {name: value}
    return dataclasses.replace(config, **changed)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = CLOCK()
    call()
    return CLOCK() - start


def main() -> None:
    """Answer until the input ends."""
    shape, form = sys.argv[1:]
    worker = Bare(checkpoint(shape)) if form == "bare" else OwnEngine(checkpoint(shape), form)
    print(json.dumps({"ready": True, "about": worker.about}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        took = worker.prefill() if asked["what"] == "prefill" else worker.decode(asked["batch"], asked["steps"])
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
