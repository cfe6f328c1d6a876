"""What a CUDA device computes with: the families of `kernels.triton`, imported when one is first used.

A machine without a GPU needs no Triton.
"""

import functools
import importlib
from types import ModuleType

from torch import Tensor


def takes(x: Tensor) -> bool:
    """Whether our Triton kernels are to take it."""
    return x.is_cuda


@functools.cache
def family(name: str) -> ModuleType:
    """A module of `kernels.triton`, whose functions have the names and signatures of their twins."""
    return importlib.import_module(f"sluice_server.kernels.triton.{name}")
