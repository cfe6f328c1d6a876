"""A program: loads one rank's part of a checkpoint and prints the most memory that this took, in bytes.

Pages of the checkpoint's file are not counted: the system has them anyway, and takes them back.
"""

import sys
import threading
from pathlib import Path

import torch

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import thread_sums
from sluice_server.kernels.formats.packer import PLAIN


def used() -> int:
    """Bytes of this process that are its own."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def load(path: Path, rank: int, size: int) -> object:
    """The model of a rank."""
    ranks = Ranks(ParallelShape(size, rank), thread_sums(size)[rank])
    return load_model(path, read_config(path), torch.bfloat16, torch.device("cpu"), 64, PLAIN, ranks=ranks)


def main(small: str, path: str, rank: int, size: int) -> None:
    """Loads a small model first, as the first takes memory for libraries."""
    load(Path(small), rank, size)
    before, peak, ended = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.0005):
            peak = max(peak, used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(Path(path), rank, size)
    ended.set()
    watcher.join()
    sys.stdout.write(f"{max(peak, used()) - before}\n")
    del model


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
