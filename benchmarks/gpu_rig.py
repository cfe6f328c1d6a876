"""An engine over random weights for the engine's GPU benchmark, and a watch on how long the host waits.

On a CUDA device steps are recorded and overlapped; on any other a plain runner computes them, which is how tests run
the benchmark.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.by_layer import RopeConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.spans import Dim, Shape, sizes_of
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.worker.device import CudaDevice, Device, HostCopy
from sluice_server.engine.worker.overlapped import overlap
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.kernels.formats.packer import LinearPacker

BLOCK = 32
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    norm_eps=1e-6,
    rope=RopeConfig(),
    windows=(None,) * 32,
    context_length=4096,
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_ids=(),
    dtype="bfloat16",
    defaults=SamplingParams(),
)
QWEN_06B = dataclasses.replace(
    LLAMA_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    intermediate_size=3072,
    windows=(None,) * 28,
    tied_embeddings=True,
)


class Kept(NamedTuple):
    """Attributes:
    weights: the format that matrices are rounded to; empty for none.
    cache: of keys and values; None for the activations'.
    """

    weights: str = ""
    cache: torch.dtype | None = None


PLAIN = Kept()


class DeviceRandomWeights:
    """Normal weights of any name, on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def get(self, name: str, shape: Shape) -> Tensor:
        """Returns a tensor."""
        sizes = sizes_of(shape)
        if len(sizes) == 1:
            return torch.ones(sizes, dtype=self._dtype, device=self._device)
        return torch.randn(sizes, dtype=self._dtype, device=self._device) * 0.02

    def stored(self, name: str, rows: Dim, width: Dim) -> None:
        """Returns None: nothing is quantised."""

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> None:
        """None, as `stored`."""

    def has(self, name: str) -> bool:
        """Returns True: every tensor exists."""
        return True


class Watched:
    """A device, and how long its results were waited for.

    Attributes:
        waited_s: in all.
    """

    def __init__(self, device: Device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited_s = 0.0
        self._device, self._clock = device, clock

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return self._device.upload(values)

    def download(self, values: Tensor) -> "WatchedArrival":
        return WatchedArrival(self, self._device.download(values))

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return self._device.capture(body)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return self._device.aside()

    def join(self) -> None:
        self._device.join()

    def taken(self) -> int:
        return self._device.taken()

    def time(self, wait: Callable[[], "np.ndarray[Any, Any]"]) -> "np.ndarray[Any, Any]":
        """Runs a wait and adds its time."""
        begun = self._clock()
        try:
            return wait()
        finally:
            self.waited_s += self._clock() - begun


class WatchedArrival:
    """An arrival of a watched device."""

    def __init__(self, watched: Watched, arrival: HostCopy) -> None:
        self._watched, self._arrival = watched, arrival

    @property
    def is_there(self) -> bool:
        return self._arrival.is_there

    def wait(self) -> "np.ndarray[Any, Any]":
        return self._watched.time(self._arrival.wait)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRig:
    """An engine, the device that it waits for (None where it waits for none), and its runner."""

    engine: Engine
    watched: Watched | None
    runner: StepRunner

    @property
    def waited_s(self) -> float:
        """The seconds waited so far."""
        return 0.0 if self.watched is None else self.watched.waited_s


def make_rig(  # noqa: PLR0913 # the parts and sizes of an engine
    config: ModelConfig,
    num: int,
    num_blocks: int,
    device: torch.device,
    kept: Kept = PLAIN,
    grammars: Grammars | None = None,
    mixed_tokens: int = 0,
) -> GpuRig:
    """An engine for `num` sequences; every size of a step that can be recorded is recorded.

    `mixed_tokens`: of a step at most, if steps with prompts are recorded, too.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pack = LinearPacker(kept.weights)
    model = Model(config, DeviceRandomWeights(dtype, device), dtype, device, config.context_length, pack)
    store = BlockStore(model.new_cache(num_blocks, BLOCK, kept.cache))
    runner: StepRunner = Runner(model, store, BLOCK, num, config.context_length, grammars)
    watched = None
    if device.type == "cuda":
        watched = Watched(CudaDevice(device))
        plain = Runner(model, store, BLOCK, num, config.context_length, grammars)
        runner = overlap(plain, model, store, watched, Slots(num, config.context_length, BLOCK, mixed_tokens))
        while runner.idle():
            continue
    cache = KVCache(num_blocks, BLOCK, prefix_caching=True)
    limits = Limits(config.context_length, config.vocab_size)
    return GpuRig(Engine(Scheduler(cache, limits, config.eos_ids, num, mixed_tokens or 8192), runner), watched, runner)


def prompts_of(sizes: list[int]) -> list[tuple[int, ...]]:
    """Random prompts of that many tokens."""
    rng = random.Random(0)
    return [tuple(rng.randrange(1, 10_000) for _ in range(size)) for size in sizes]


def add(engine: Engine, sizes: list[tuple[int, int]]) -> None:
    """Adds requests of that many tokens in and out."""
    for i, (prompt, (_, num_out)) in enumerate(zip(prompts_of([num for num, _ in sizes]), sizes, strict=True)):
        engine.add(EngineRequest(f"{i}", prompt, SamplingParams(max_tokens=num_out, temperature=0.6, ignore_eos=True)))
