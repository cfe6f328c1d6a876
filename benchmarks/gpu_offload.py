"""Decode steps of an engine on one GPU with none, a few, half and all of the layers' weights in memory of the host.

    python -m benchmarks.gpu_offload [--parts bfloat16,int8,int4] [--fresh] [--seconds N] [--out DIR] [--dry-run]

A random checkpoint of a Llama of 1B, whose layers have 122 MB each in bfloat16; steps as served: recorded where they
are. Reported are the median step at 1 and 32 rows, the weights copied in it a second, and what share that is of a bare
copy of pinned memory; and whether the tokens are those without offloading.
"""

import dataclasses
import functools
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_command import Ground, asked
from benchmarks.gpu_results import Row
from benchmarks.machine import median
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.formats import choose_formats
from sluice_server.engine.worker.startup.planned import layer_bytes
from tests.oracle.checkpoints import Shape, make_checkpoint

PARTS = ("bfloat16", "int8", "int4")
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the layers; two are in memory of the device at a time
ROWS = (1, 32)
STEPS = 40
COPIED = 256 << 20
LLAMA_1B = Shape("llama", 128_256, 2048, 16, 32, 8, 64, 8192, 2048, tied=True, spread=0.03)
TINY = Shape("llama", 512, 256, 16, 4, 2, 64, 512, 256, tied=True, spread=0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what has no result yet, and reports failures."""
    given = asked("gpu_offload", __doc__, PARTS, arguments)
    with tempfile.TemporaryDirectory() as folder:
        with given.ground.at.device:
            directory = make_checkpoint(Path(folder), TINY if given.ground.is_dry else LLAMA_1B)
        todo: list[tuple[str, Callable[[], Row]]] = [
            (part, functools.partial(compare, given.ground, directory, part)) for part in given.parts
        ]
        return given.run(todo)


def compare(ground: Ground, directory: Path, part: str) -> Row:
    """Milliseconds of a step with each share of the layers in memory of the host."""
    config = config_of(ground, part)
    model = read_config(directory)
    sizes = layer_bytes(directory, model, choose_formats(config, ground.at.device))
    found: Row = {}
    tokens = []
    copied = 0.0 if ground.is_dry else bare_copy()
    for share in SHARES:
        num = int(share * len(sizes))
        own = dataclasses.replace(config, weights_offload_bytes=sum(sizes[:num]))
        built = build_engine(own, model, directory, limits_of(own, model, 1 << 20))
        size = 0 if built.offloaded is None else built.offloaded.num_bytes
        for rows in ROWS:
            step, ids = steps_of(built.engine, rows)
            tokens.append((rows, ids))
            found[f"{num} layers, {rows} rows, ms"] = step * 1e3
            if size and not ground.is_dry:
                found[f"{num} layers, {rows} rows, of copy"] = size / step / copied
        found[f"{num} layers, MB"] = size / 1e6
        built.close()
        del built
        gc.collect()
        torch.cuda.empty_cache()
    equal = all(ids == dict(tokens[: len(ROWS)])[rows] for rows, ids in tokens)
    return found | {"tokens are equal": equal, "bare copy, GB/s": copied / 1e9}


def config_of(ground: Ground, part: str) -> EngineConfig:
    """The settings of an engine with weights in that form."""
    on = ground.at.device.type
    config = EngineConfig(device=on, block_size=32, max_num_seqs=max(ROWS), kv_cache_tokens=16_384)
    return config if part == "bfloat16" else dataclasses.replace(config, quantization=part)


def steps_of(engine: Engine, rows: int) -> tuple[float, list[list[int]]]:
    """Seconds of a median step that decodes so many rows, and their tokens."""
    ids: dict[str, list[int]] = {f"{at}": [] for at in range(rows)}
    for name in ids:
        params = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(name, tuple(range(3 + int(name), 40 + int(name))), params))
    times = []
    while engine.has_work:
        begun = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - begun)
        for event in events.sampled:
            ids[event.request_id] += event.token_ids
    return median(times[8:-4]), [*ids.values()]


def bare_copy() -> float:
    """Bytes a second of a copy from pinned memory."""
    source = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return COPIED / median(times)


if __name__ == "__main__":
    sys.exit(main())
