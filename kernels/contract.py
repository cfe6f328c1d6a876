"""What holds of the bits of results: by what name they go, and whether they depend on the batch.

Two things that compute and may differ in one bit of a result have two names: for results that outlive a process or
leave its machine.
"""

import hashlib
import importlib
from pathlib import Path

import torch

from sluice_server.kernels.cpu import builds, native

CONTRACT = 1  # grows with each change of what kernels, their twins or the models above them compute, to the bit


def computes_as(device: torch.device) -> str:
    """The contract, the versions of what computes on a device, and the device's own kind."""
    common = f"contract {CONTRACT}, torch {torch.__version__}"
    if device.type == "cpu":
        return f"{common}, {torch.backends.cpu.get_cpu_capability()} {builds.best_known()}, {_build()}"
    triton = importlib.import_module("triton").__version__
    return f"{common}, {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, Triton {triton}"


def is_batch_invariant(device: torch.device, head_dim: int, *, is_fixed: bool = False) -> dict[str, bool]:
    """Of each operation of `kernels.ops` on `device`, in any dtype and format, with heads of `head_dim`: whether a
    row's bits are independent of the other rows, of the chunking and of the thread count (a test compares them). Tokens
    then do not depend on company; where it is not so, a near tie may flip, nothing else. `is_fixed`: where a GPU takes
    the slower schedules that do not follow the batch (see `Layer.is_fixed`)."""
    on_fixed_gpu, on_cpu = is_fixed and device.type == "cuda", device.type == "cpu"
    linear = on_fixed_gpu or on_cpu
    return {
        "linear": linear,
        "linear_normed": linear,
        "linear_gated": linear,
        "rms_norm": True,
        "soft_cap": not on_cpu or builds.is_available(),  # torch computes the end of a row otherwise
        "route": True,
        "embedding": True,
        "rotate_and_write": True,
        "sample": True,
        # Torch's decode and prefill sum in different orders.
        "paged_attention": on_fixed_gpu or (on_cpu and builds.is_available() and native.has_heads_of(head_dim)),
    }


def _build() -> str:
    """Of our own CPU kernels the instruction set and what the compiler made: another compiler rounds elsewhere."""
    path = builds.MODULE.__file__ if builds.MODULE is not None else None
    if path is None:
        return builds.instruction_set()
    return f"{builds.instruction_set()} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
