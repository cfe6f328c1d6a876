"""A whole engine through Triton's own binder and compiler, for sm_90 and without a GPU: nothing is launched, and what
kernels would write is zero. Prints which kernels compile once the engine has started: there should be none.

    TRITON_INTERPRET=0 python -m tests.kernels.triton.jit_watch plain|w8a8|fixed
"""

import dataclasses
import functools
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu_rig import QWEN_06B, DeviceRandomWeights
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.worker.overlapped import overlap
from sluice_server.engine.worker.recorded_steps import InFlightDrafts
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup.memory import StepRows, ladder, whole_step
from sluice_server.kernels import gpu
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.formats.packer import LinearPacker
from tests.engine.worker.host_device import HostDevice

CPU, CUDA, LENGTH = torch.device("cpu"), torch.device("cuda"), 512
SHAPE = dataclasses.replace(
    QWEN_06B,
    vocab_size=1024,
    hidden_size=128,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    windows=(None,),
    context_length=LENGTH,
)
FORMS: dict[str, tuple[str, torch.dtype | None]] = {
    "plain": ("", None),
    "fixed": ("", None),
    "w8a8": ("w8a8", torch.float8_e4m3fn),
}
LOADS = ((11, 0), (8, 0), (8, 1), (3, 2), (5, 90), (1, 0), (2, 33))  # requests at once, and tokens more of each


class Hopper:
    """A driver for a GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def pretend() -> None:
    """Presents CPU tensors as a GPU's; kernels are compiled and not run, memory is zero."""
    driver.set_active(Hopper())
    run = JITFunction.run
    JITFunction.run = lambda self, *given, grid=None, warmup=False, **named: run(
        self, *given, grid=grid, warmup=True, **named
    )
    for name in ("empty", "empty_like"):
        setattr(torch, name, functools.partial(_zero, getattr(torch, name.replace("empty", "zeros"))))
    setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # noqa: B010 # mypy allows no assignment
    gpu.takes = lambda x: True
    on_gpu = {name: tuple(one for one in table if one.fits(CUDA)) for name, table in kinds.KINDS.items()}
    kinds.KINDS = {
        name: tuple(dataclasses.replace(one, fits=lambda _: True) for one in table) for name, table in on_gpu.items()
    }


def _zero(make: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 # as torch's
    named.pop("memory_format", None)
    return make(*given, **named)


def started(form: str) -> Engine:
    """An engine that was started as `engine.build` starts one on a GPU."""
    weights, cache = FORMS[form]
    pack = LinearPacker(weights)
    model = Model(SHAPE, DeviceRandomWeights(torch.bfloat16, CPU), torch.bfloat16, CPU, LENGTH, pack)
    if form == "fixed":
        model.fix()
    for num in ladder(256):
        whole_step(model, cache or torch.bfloat16, num, StepRows(8, LENGTH, 32))
    store = BlockStore(model.new_cache(64, 32, cache))
    slots, drafts = Slots(8, LENGTH, 32), InFlightDrafts((1, 3), may_branch=form != "fixed")
    runner = overlap(Runner(model, store, 32, 8, LENGTH), model, store, HostDevice(), slots, drafts)
    while runner.idle():
        continue
    return Engine(Scheduler(KVCache(64, 32, True), Limits(LENGTH, SHAPE.vocab_size), (), 8, 256), runner)


PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_p": 0.9, "min_p": 0.1, "typical_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((3, 1.0), (4, -1.0))},
    {"allowed_token_ids": (3, 4, 5)},
    {"bad_token_ids": (3, 4)},
    {"logprobs": 2, "logprob_token_ids": (3,)},
    {"prompt_logprobs": 2},
    {"n": 2},
    {"beam_width": 2},
)


def serve(engine: Engine, num: int, more: int) -> None:
    """Serves greedy and sampled requests, with every parameter and without."""
    for i in range(num):
        params = SamplingParams(
            max_tokens=6, temperature=float(i % 2), seed=i, ignore_eos=True, **PARAMETERS[i % len(PARAMETERS)]
        )
        engine.add(EngineRequest(f"{i}", tuple(range(1, 6 + more + 37 * i)), params))
    while engine.has_work:
        assert not engine.step().failed


def main(form: str) -> list[str]:
    """Prints the kernels that compiled after the start."""
    pretend()
    engine, late = started(form), list[str]()
    triton.knobs.runtime.jit_cache_hook = lambda **named: late.append(named["fn"].name)
    for num, more in LOADS:
        serve(engine, num, more)
    return late


if __name__ == "__main__":
    print("late:", *main(sys.argv[1]))
