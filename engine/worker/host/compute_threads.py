"""With how many threads the CPU computes: torch and our own kernels are told here, and nowhere else."""

import time
from collections.abc import Callable

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.engine.worker.host.threads import ThreadTuner, counts_of
from sluice_server.kernels.cpu import builds


def set_threads(config: EngineConfig) -> tuple[int, str]:
    """Compute with as many threads as asked for, else with those that `engine.worker.host.cores` allows: how many, and
    why."""
    cores = find_cores()
    threads = config.threads or cores.usable
    use_threads(threads)
    return threads, "--threads" if config.threads else str(cores)


def use_threads(num: int) -> None:
    """Compute with so many."""
    torch.set_num_threads(num)
    builds.set_threads(num)


def tune_threads(config: EngineConfig, step: Callable[[], object]) -> ThreadTuner:
    """What measures how many of the threads that `set_threads` sets pay, and has done so once; unless their number was
    asked for."""
    most, why = set_threads(config)
    counts = (most,) if config.threads else counts_of(most)
    tuner = ThreadTuner(step, use_threads, counts, why, time.perf_counter)
    tuner.start()
    return tuner
