"""Gives access to the modules of `kernels.triton`, each imported at its first use.

A machine without a GPU therefore needs no Triton.
"""

import functools
import importlib
from types import ModuleType

from torch import Tensor


def takes(x: Tensor) -> bool:
    """Returns whether the Triton kernels compute with this tensor."""
    return x.is_cuda


@functools.cache
def family(name: str) -> ModuleType:
    """Returns a module of `kernels.triton`; its functions have the names and signatures of the reference
    implementations."""
    return importlib.import_module(f"sluice_server.kernels.triton.{name}")
