"""What computes, by name: two that may differ in one bit of a result have two names. For results that outlive a process
or leave its machine."""

import hashlib
import importlib
from pathlib import Path

import torch

from kernels.cpu import builds

CONTRACT = 1  # grows with each change of what kernels, their twins or the models above them compute, to the bit


def computes_as(device: torch.device) -> str:
    """The contract, the versions of what computes on a device, and the device's own kind."""
    common = f"contract {CONTRACT}, torch {torch.__version__}"
    if device.type == "cpu":
        return f"{common}, {torch.backends.cpu.get_cpu_capability()} {builds.best_known()}, {_build()}"
    triton = importlib.import_module("triton").__version__
    return f"{common}, {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, Triton {triton}"


def _build() -> str:
    """Of our own CPU kernels the instruction set and what the compiler made: another compiler rounds elsewhere."""
    path = builds.MODULE.__file__ if builds.MODULE is not None else None
    if path is None:
        return builds.instruction_set()
    return f"{builds.instruction_set()} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
