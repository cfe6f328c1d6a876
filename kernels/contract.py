"""Names what computes a result, and states which operations are batch-invariant.

Two implementations that may differ in one bit of a result have different names. The names are attached to results that
outlive a process or leave its machine.
"""

import functools
import hashlib
import importlib
from pathlib import Path

import torch

from sluice_server.kernels.cpu import builds, native

CONTRACT = 11  # increased with each change of any bit that kernels, reference implementations or models compute


def computes_as(device: torch.device) -> str:
    """Returns a name for what computes on a device: the contract, the versions of the libraries, and the device's
    kind."""
    common = f"contract {CONTRACT}, torch {torch.__version__}"
    if device.type == "cpu":
        return f"{common}, {torch.backends.cpu.get_cpu_capability()} {builds.best_known()}, {build()}"
    triton = importlib.import_module("triton").__version__
    return f"{common}, {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, Triton {triton}"


def is_batch_invariant(device: torch.device, head_dim: int, *, is_fixed: bool = False) -> dict[str, bool]:
    """Returns for each operation of `kernels.ops` on `device` whether it is batch-invariant.

    True means that a row's bits are independent of the other rows, of the chunking and of the thread count, in any
    dtype and format, with heads of `head_dim`; a test compares the bits. Tokens then do not depend on the other
    requests of a batch. False means that a near tie between tokens may be decided differently, and nothing else.
    `is_fixed` is set where a GPU uses the slower schedules that do not depend on the batch (see `Layer.is_fixed`).
    """
    on_fixed_gpu, on_cpu = is_fixed and device.type == "cuda", device.type == "cpu"
    linear = on_fixed_gpu or on_cpu
    return {
        "linear": linear,
        "linear_normed": linear,
        "linear_gated": linear,
        "rms_norm": True,
        "soft_cap": not on_cpu or builds.is_available(),  # torch computes the end of a row with other instructions
        "route": True,
        "embedding": True,
        "rotate_and_write": True,
        "sample": True,
        # Torch's decode and prefill sum in different orders.
        "paged_attention": on_fixed_gpu or (on_cpu and builds.is_available() and native.has_heads_of(head_dim)),
    }


@functools.cache
def build() -> str:
    """Returns the C++ kernels' instruction set and a hash of their binary, as another compiler rounds differently. The
    first call reads the binary."""
    path = builds.MODULE.__file__ if builds.MODULE is not None else None
    if path is None:
        return builds.instruction_set()
    return f"{builds.instruction_set()} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
