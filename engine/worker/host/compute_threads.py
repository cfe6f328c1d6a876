"""Sets the number of compute threads of torch and of our kernels; the only place that does so."""

import time
from collections.abc import Callable

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.engine.worker.host.threads import ThreadTuner, counts_of
from sluice_server.kernels.cpu import builds


def set_threads(config: EngineConfig) -> tuple[int, str]:
    """Sets the number of compute threads: the configured one, else what `engine.worker.host.cores` allows.

    Returns the number and its reason.
    """
    cores = find_cores()
    threads = config.threads or cores.usable
    use_threads(threads)
    return threads, "--threads" if config.threads else str(cores)


def use_threads(num: int) -> None:
    """Sets the number of compute threads."""
    torch.set_num_threads(num)
    builds.set_threads(num)


def tune_threads(config: EngineConfig, step: Callable[[], object]) -> ThreadTuner:
    """Returns a tuner that has measured once how many of the threads that `set_threads` sets pay off.

    Nothing is measured if the number is configured.
    """
    most, why = set_threads(config)
    counts = (most,) if config.threads else counts_of(most)
    tuner = ThreadTuner(step, use_threads, counts, why, time.perf_counter)
    tuner.start()
    return tuner
