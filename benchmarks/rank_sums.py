"""Times one sum over ranks: shared memory, beside gloo's own all-reduce and our sums over gloo, taken in turn.

`python -m benchmarks.rank_sums [--ranks 2] [--width 1024]`. Each rank is a process; rank 0's times are shown. Ranks
spin: with fewer cores than ranks, times are those of the scheduler.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.sums_gloo import GlooSums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment
from sluice_server.kernels.cpu import builds

ROWS, ROUNDS, PART = (1, 8, 32), 60, 40  # rows of a sum; turns of all ways; sums of a way in a turn
ADDRESS = "127.0.0.1"
Sum = Callable[[Tensor], None]


def arguments() -> argparse.Namespace:
    """Reads the command line; --rank and --file are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def ways(options: argparse.Namespace) -> dict[str, Sum]:
    """Returns what is compared, by name."""
    rank, size, folder = options.rank, options.ranks, Path(options.folder)
    shared = SharedMemorySums(options.file, rank, timeout_s=60.0)
    over_gloo = GlooSums(dist.FileStore(str(folder / "ours"), size), rank, size, ADDRESS, timeout_s=60.0)
    backend: Any = dist.ProcessGroupGloo
    own = backend._Options()
    own._devices, own._timeout = [backend.create_device(hostname=ADDRESS)], timedelta(seconds=60)
    plain = backend(dist.FileStore(str(folder / "plain"), size), rank, size, own)

    def add(sums: SharedMemorySums | GlooSums) -> Sum:
        def of(h: Tensor) -> None:
            sums.add(h, sums.room(*h.shape))

        return of

    def all_reduce(h: Tensor) -> None:
        plain.allreduce([h]).wait()

    return {"shared memory": add(shared), "gloo all-reduce": all_reduce, "sums over gloo": add(over_gloo)}


def times(options: argparse.Namespace) -> dict[tuple[int, str], list[float]]:
    """Returns seconds of every sum, by rows and way."""
    found: dict[tuple[int, str], list[float]] = {}
    named = ways(options)
    for rows in ROWS:
        h = torch.zeros(rows, options.width)
        for _ in range(ROUNDS):
            for name, one in named.items():
                for _ in range(PART):
                    start = time.perf_counter()
                    one(h)
                    found.setdefault((rows, name), []).append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measures, and prints a table if this is rank 0."""
    options = arguments()
    torch.set_num_threads(1)
    builds.set_threads(1)
    if options.rank:
        times(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.file, options.folder = new_segment(options.ranks), folder
        common = [
            f"--ranks={options.ranks}",
            f"--width={options.width}",
            f"--file={options.file}",
            f"--folder={folder}",
        ]
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rank_sums", f"--rank={rank}", *common], pass_fds=[options.file]
            )
            for rank in range(1, options.ranks)
        ]
        found = times(options)
        for one in others:
            one.wait()
    print(f"{options.ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; µs, least and median")
    for (rows, name), each in found.items():
        least = min(found[rows, "gloo all-reduce"]) / min(each)
        median = statistics.median(each)
        print(f"[{rows}, {options.width}] {name:16} {min(each) * 1e6:8.1f} {median * 1e6:8.1f}   {least:5.1f} x gloo's")


if __name__ == "__main__":
    main()
