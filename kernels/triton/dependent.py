"""Programmatic dependent launches: a kernel takes its place on multiprocessors while the one before it ends.

Without them a GPU idles between kernels for as long as the last programs of one and the first loads of the next take,
which in a step of few rows is longer than some kernels. A kernel launched so waits in `wait_for_inputs` before it reads
what others have written or writes anything. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch".
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from sluice_server.kernels.triton.support import DEPENDENT_SINCE


def dependent(x: Tensor) -> dict[str, bool]:
    """Returns the arguments with which a kernel is launched that has `IS_DEPENDENT`, on the device of a tensor."""
    return arguments_on(x.device)


@functools.cache
def arguments_on(device: torch.device) -> dict[str, bool]:
    """Returns those of `dependent` on a device."""
    since = DEPENDENT_SINCE // 10, 0
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= since:
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Lets the next kernel take its place, and waits until all that kernels before this one wrote can be read.

    Every program calls this, also one that has nothing to do: a kernel that ends earlier than the one before it would
    let the next one begin too early.
    """
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
