"""Which of our own CPU kernels (kernels/cpu, C++) there are and which serve.

Built with the package, once for each instruction set; the best that this machine can run is taken. Without a compiler
at installation, or on another machine, there are none: `is_available` says so and torch's operators serve instead.
"""

import importlib
from types import ModuleType

import torch

BY_CAPABILITY = {"AVX512": ("v4", "v3"), "AVX2": ("v3",)}  # what torch calls the machine's best → modules, best first
# Better ones where the machine has AVX-512 and all that is named, best first; in torch's words.
BY_EXTENSION = {
    "v4_amx": ("amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"),
    "v4_bf16": ("avx512_bf16", "avx512_vnni"),
    "v4_vnni": ("avx512_vnni",),
}
KNOWN = (*BY_EXTENSION, *BY_CAPABILITY["AVX512"])  # all instruction sets, best first


def load(name: str) -> ModuleType | None:
    """The kernels built for the instruction set `name`; None if there are none or they cannot be used (`why_not`)."""
    try:
        return importlib.import_module(f"sluice_server.kernels.cpu.{name}")
    except ImportError:
        return None


def why_not(name: str) -> str:
    """Why `load` finds none; empty where it does."""
    try:
        importlib.import_module(f"sluice_server.kernels.cpu.{name}")
    except ImportError as error:
        return str(error)
    return ""


def runnable() -> tuple[str, ...]:
    """Instruction sets of this machine that there may be kernels for, best first."""
    capability, able = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
    has_more = capability == "AVX512"
    extended = (name for name, needed in BY_EXTENSION.items() if has_more and all(map(able.get, needed)))
    return (*extended, *BY_CAPABILITY.get(capability, ()))


MODULE = next(filter(None, map(load, runnable())), None)


def best_known() -> str:
    """The best instruction set of this machine that there may be kernels for, built or not; empty without any."""
    return next(iter(runnable()), "")


def is_available() -> bool:
    """Whether there are kernels for this machine."""
    return MODULE is not None


def multiplies(extension: str) -> bool:
    """Whether the kernels in use have products of their own for an extension of `BY_EXTENSION`."""
    return extension in BY_EXTENSION.get(instruction_set(), ())


def instruction_set() -> str:
    """What the kernels in use were built for, or "none"."""
    return MODULE.__name__.rpartition(".")[2] if MODULE else "none"


def set_threads(num: int) -> None:
    """Threads that compute, the caller's among them."""
    if MODULE is not None:
        MODULE.set_threads(num)
