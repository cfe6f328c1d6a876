"""Pretended GPUs in the engine processes of a whole service, which `tests.faults.injected.sitecustomize` enters there.

Each process has a device of its own; gloo carries what NCCL would between them.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.sums_nccl import Collectives
from sluice_server.services.process import heartbeat
from sluice_server.services.ranks import devices
from tests.engine.parallel.test_sums_nccl import PATIENT_S, standing_in
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.device_ranks import PretendedNccl


def pretended_nccl(store: dist.Store, rank: int, size: int, timeout_s: float) -> Collectives:
    """See `sums_nccl.nccl_group`."""
    return PretendedNccl(standing_in(store, rank, size))


@contextlib.contextmanager
def pretended_gpus(num: int) -> Iterator[None]:
    """A context in which this process computes on one of so many GPUs."""
    with pretend(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: num)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(devices, "nccl_group", pretended_nccl)
        patch.setattr(heartbeat, "PATIENCE_S", PATIENT_S)  # a step of interpreted kernels takes seconds
        yield
