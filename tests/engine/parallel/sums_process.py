"""A rank that is a process of its own: `python sums_process.py FD RANK SUMS`, which adds, and says each time it did.

It begins a sum when it reads a line. Its last one waits for a rank that may not come.
"""

import sys

import torch

from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.engine.parallel.sums_shared import SharedMemorySums

SHAPE = (4, 48)


def numbers(rank: int, at: int) -> torch.Tensor:
    """What a rank gives to its sum number `at`."""
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(100 * at + rank)) * 10.0 ** (3 * rank)


def main() -> None:
    """Adds as often as lines come."""
    file, rank, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    sums = SharedMemorySums(file, rank, timeout_s=timeout_s)
    print("ready", flush=True)
    for at, _ in enumerate(sys.stdin):
        into = torch.ones(SHAPE)
        try:
            sums.add(into, [numbers(rank, at)])
        except SumsBroken as error:
            print(f"broken {error.rank}", flush=True)
            return
        print(float(into.double().sum()).hex(), flush=True)


if __name__ == "__main__":
    main()
