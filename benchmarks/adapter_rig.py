"""The engines, adapters and requests that measurements of adapters share."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.cpu.shapes import checkpoint
from sluice_server.engine.adapters.modules import Module, modules_of
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import traits_of
from sluice_server.engine.request import AdapterRef, EngineRequest, SamplingParams

RANK = 16
PROMPT = tuple(range(100, 116))
NUM_STEPS = 24  # of a measurement
SLOTS = 8
ROWS = (8, 32)
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


START_S = time.perf_counter()


def tell(text: str) -> None:
    """Prints how far a measurement is, with the seconds since the start, beside its results."""
    print(f"{time.perf_counter() - START_S:6.0f} s  {text}", file=sys.stderr, flush=True)


def modules_of_shape(shape: str) -> list[Module]:
    """The modules of a shape that adapters can change."""
    config = read_config(checkpoint(shape))
    return list(modules_of(config, traits_of(config)).values())


def write_adapters(folder: Path, shape: str, num: int, rank: int) -> None:
    """Writes random adapters in bfloat16, on all projections."""
    config = read_config(checkpoint(shape))
    names = modules_of(config, traits_of(config))
    targets = sorted({one.projection for one in names.values()})
    for index in range(num):
        generator, tensors = torch.Generator().manual_seed(index), {}
        for name, one in names.items():
            for half, size in (("A", (rank, one.inputs)), ("B", (one.outputs, rank))):
                values = torch.randn(size, generator=generator).mul_(0.02).bfloat16()
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
        (folder / str(index)).mkdir()
        save_file(tensors, folder / str(index) / "adapter_model.safetensors", {"format": "pt"})
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        (folder / str(index) / "adapter_config.json").write_text(json.dumps(fields))


def make_engine(shape: str, threads: int, folder: Path | None, num_bytes: int = 8 << 30) -> Engine:
    """An engine of a shape with so many bytes for adapters; without a folder its requests name none."""
    directory = checkpoint(shape)
    model = read_config(directory)
    config = EngineConfig(
        device="cpu", dtype="bfloat16", threads=threads, max_num_seqs=max(ROWS), kv_cache_tokens=128 * max(ROWS)
    )
    if folder is not None:
        config = dataclasses.replace(config, adapter_dir=str(folder), max_adapters=SLOTS, adapter_host_bytes=num_bytes)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20)).engine


def load(engine: Engine, name: str) -> AdapterRef:
    """Loads an adapter."""
    assert engine.adapters is not None
    loaded = engine.adapters.read(name).result()
    engine.adapters.add(loaded, is_pinned=False)
    return AdapterRef(loaded.digest, name, loaded.num_bytes)


def asking(name: str, adapter: AdapterRef | None, num: int = NUM_STEPS) -> EngineRequest:
    """A request of so many greedy tokens that uses no cache."""
    params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, PROMPT, params, adapter=adapter, bypasses_cache=True)
