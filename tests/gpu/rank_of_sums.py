"""A rank on a GPU that the other ranks share: `python -m tests.gpu.rank_of_sums STORE RANK SIZE` says how its sums are.

Torch maps memory between ranks of one GPU where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 lets it.
"""

import sys
from typing import Any

import torch
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.peer_memory import GROUP, map_memory
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.engine.parallel.sums_symmetric import BUFFER_FLOATS, BUFFERS, SymmetricSums
from sluice_server.engine.worker.device import CudaDevice
from tests.engine.parallel.test_sums import uneven

SHAPES = ((1, 4096), (8, 1024), (5, 33))
PATIENT_S = 60.0
EQUAL = "equal"


def main() -> None:
    """Adds, in recorded steps and outside of them, and compares with what one rank adds on a processor."""
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    store, cuda = dist.FileStore(sys.argv[1], size), torch.device("cuda")
    dist._SymmetricMemory.set_group_info(GROUP, rank, size, store)
    no_group: Any = None  # all sums fit into a buffer
    memory = map_memory(store, rank, size, BUFFERS * BUFFER_FLOATS)
    sums = SymmetricSums(no_group, rank, size, cuda, memory, timeout_s=PATIENT_S)
    each = [uneven(size, seed, shape) for seed, shape in enumerate(SHAPES)]
    given = [values[rank].to(cuda) for values in each]
    found = [torch.empty(shape, device=cuda) for shape in SHAPES]
    wanted = [torch.ones(shape) for shape in SHAPES]
    for into, values in zip(wanted, each, strict=True):
        LocalSums(size).add(into, values)

    def add_all() -> None:
        for into, own in zip(found, given, strict=True):
            sums.add(into.fill_(1.0), [own])

    replay = CudaDevice(cuda).capture(add_all)
    for at, step in enumerate((add_all, replay, replay, add_all, replay)):
        step()
        off = [int((one.cpu() != other).sum()) for one, other in zip(found, wanted, strict=True)]
        if any(off):
            print(f"step {at}: {off} numbers of {SHAPES} differ", flush=True)
            return
    print(EQUAL, flush=True)


if __name__ == "__main__":
    main()
    sys.stdin.read()  # the others may still read this rank's memory
