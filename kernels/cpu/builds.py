"""Loads the C++ kernels (kernels/cpu): which builds exist, and which one this machine uses.

They are built with the package, once for each instruction set; the best one that this machine can run is loaded. If the
package was installed without a compiler, or the machine can run none, `is_available` returns False and torch's
operators serve instead.
"""

import importlib
from types import ModuleType

import torch

BY_CAPABILITY = {"AVX512": ("v4", "v3"), "AVX2": ("v3",)}  # torch's name of a capability → modules, best first
# Better modules for machines with AVX-512 and all the named extensions, best first; torch's names of extensions.
BY_EXTENSION = {
    "v4_amx": ("amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"),
    "v4_bf16": ("avx512_bf16", "avx512_vnni"),
    "v4_vnni": ("avx512_vnni",),
}
KNOWN = (*BY_EXTENSION, *BY_CAPABILITY["AVX512"])  # all instruction sets, best first


def load(name: str) -> ModuleType | None:
    """Loads the kernels built for the instruction set `name`; returns None if that fails, see `why_not`."""
    try:
        return importlib.import_module(f"sluice_server.kernels.cpu.{name}")
    except ImportError:
        return None


def why_not(name: str) -> str:
    """Returns why `load` returns None for `name`; empty if it does not."""
    try:
        importlib.import_module(f"sluice_server.kernels.cpu.{name}")
    except ImportError as error:
        return str(error)
    return ""


def runnable() -> tuple[str, ...]:
    """Returns the instruction sets that this machine can run and that kernels can be built for, best first."""
    capability, able = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
    has_more = capability == "AVX512"
    extended = (name for name, needed in BY_EXTENSION.items() if has_more and all(map(able.get, needed)))
    return (*extended, *BY_CAPABILITY.get(capability, ()))


MODULE = next(filter(None, map(load, runnable())), None)


def best_known() -> str:
    """Returns the best of the `runnable` instruction sets, whether it was built or not; empty if there is none."""
    return next(iter(runnable()), "")


def is_available() -> bool:
    """Returns whether there are kernels for this machine."""
    return MODULE is not None


def multiplies(extension: str) -> bool:
    """Returns whether the loaded kernels use products of an extension of `BY_EXTENSION`."""
    return extension in BY_EXTENSION.get(instruction_set(), ())


def instruction_set() -> str:
    """Returns the instruction set that the loaded kernels were built for, or "none"."""
    return MODULE.__name__.rpartition(".")[2] if MODULE else "none"


def set_threads(num: int) -> None:
    """Sets the number of threads that compute, the caller's included."""
    if MODULE is not None:
        MODULE.set_threads(num)
