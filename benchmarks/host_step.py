"""Host time of a steady decode step: the engine over a device that takes no time.

    python -m benchmarks.host_step [--rows 1 32 256] [--steps 300] [--profile]

A tiny model has the slots and the context of a 0.6B one; its recorded steps, the kernel that writes to the rows of
slots, and its downloads do nothing, so that what is left is what the host does: processor time, in microseconds. Parts
are timed in a run of their own, as the clock is a part of them. On a GPU the calls of the driver come on top
(`gpu_engine`, `host_ms`).
"""

import argparse
import contextlib
import cProfile
import dataclasses
import functools
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_engine import TINY
from benchmarks.gpu_rig import BLOCK, DeviceRandomWeights, add
from benchmarks.machine import median, write
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import Limits
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.worker import overlapped
from sluice_server.engine.worker.launched import LaunchedStep
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.staging import StagedTokens
from sluice_server.engine.worker.steps import UniformSteps
from sluice_server.kernels import ops

CONTEXT = 4096
PROMPT = 64
FILLING = 16  # steps until all prompts are computed and one decode is in flight
WORD = 7
CPU = torch.device("cpu")
MODEL = dataclasses.replace(TINY, context_length=CONTEXT)
PARTS: tuple[tuple[str, Any, str], ...] = (  # a name, and a function's class or module
    ("plan", Engine, "_plan"),
    ("place", OverlappedRunner, "place"),
    ("stage", StagedTokens, "stage"),
    ("numbers", overlapped, "numbers_of_step"),
    ("launch", UniformSteps, "launch"),
    ("collect", LaunchedStep, "collect"),
    ("outputs", Scheduler, "apply"),
)


class NoTime:
    """A device whose work is done before it begins: nothing is computed, and every sampled id is `WORD`."""

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(values)

    def download(self, values: Tensor) -> "Arrived":
        return Arrived(len(values))

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return _nothing

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self) -> None:
        """Waits for nothing."""

    def taken(self) -> int:
        return 0


class Arrived:
    """A copy that was there at once."""

    is_there = True

    def __init__(self, num: int) -> None:
        self._values = np.full(num, WORD, dtype=np.int64)

    def wait(self) -> "np.ndarray[Any, Any]":
        return self._values


def _nothing(*args: object) -> None:
    """What the device computes."""


@contextlib.contextmanager
def computes_nothing() -> Iterator[None]:
    """A context in which no kernel writes what was staged."""
    with mock.patch.object(ops, "write_runs_", _nothing):
        yield


def steady(num: int, steps: int) -> Engine:
    """An engine with `num` rows, all of which decode for at least so many steps."""
    torch.manual_seed(0)
    num_blocks = num * (-(-(PROMPT + steps + FILLING) // BLOCK) + 2)
    model = Model(MODEL, DeviceRandomWeights(torch.float32, CPU), torch.float32, CPU, CONTEXT)
    store = BlockStore(model.new_cache(num_blocks, BLOCK))
    plain = Runner(model, store, BLOCK, num, CONTEXT)
    runner = overlap(plain, model, store, NoTime(), Slots(num, CONTEXT, BLOCK))
    while runner.idle():
        continue
    scheduler = Scheduler(KVCache(num_blocks, BLOCK, True), Limits(CONTEXT, MODEL.vocab_size), (2,), num, 8192)
    engine = Engine(scheduler, runner)
    add(engine, [(PROMPT + i % BLOCK, steps + FILLING) for i in range(num)])  # every step, some rows need a block
    for _ in range(FILLING):
        engine.step()
    return engine


def timed(engine: Engine, steps: int) -> list[float]:
    """Microseconds of processor time of each step."""
    took = []
    with computes_nothing():
        for _ in range(steps):
            begun = time.thread_time_ns()
            engine.step()
            took.append((time.thread_time_ns() - begun) / 1e3)
    return took


@contextlib.contextmanager
def watched(spent: Counter[str]) -> Iterator[None]:
    """A context in which the nanoseconds of all parts are counted."""
    before = [(owner, name, owner.__dict__[name]) for _, owner, name in PARTS]
    for part, owner, name in PARTS:
        setattr(owner, name, _counted(owner.__dict__[name], part, spent))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _counted(method: Any, part: str, spent: Counter[str]) -> Any:  # noqa: ANN401 # a function or a static one
    is_static = isinstance(method, staticmethod)
    call = method.__func__ if is_static else method

    @functools.wraps(call)
    def counted(*args: Any, **named: Any) -> Any:  # noqa: ANN401 # as the method
        begun = time.thread_time_ns()
        try:
            return call(*args, **named)
        finally:
            spent[part] += time.thread_time_ns() - begun

    return staticmethod(counted) if is_static else counted


def host_step(num: int, steps: int) -> dict[str, float]:
    """Microseconds of a step of `num` rows, and of its parts."""
    engine = steady(num, 2 * steps + 1)
    took, spent = timed(engine, steps), Counter[str]()
    with watched(spent):
        in_parts = sum(timed(engine, steps))
    parts = {part: spent[part] / 1e3 / steps for part, _, _ in PARTS}
    parts["rest"] = in_parts / steps - sum(parts.values())
    found = {"us_a_step": median(took), "us_a_row": median(took) / num, "mean_us": sum(took) / steps}
    return {name: round(value, 2) for name, value in {**found, **parts}.items()}


def profiled(num: int, steps: int) -> None:
    """Prints where the time of a step of `num` rows goes, by function."""
    engine, profile = steady(num, steps + 1), cProfile.Profile()
    profile.runcall(timed, engine, steps)
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, and write no result")
    options = parser.parse_args(arguments)
    if options.profile:
        for num in options.rows:
            profiled(num, options.steps)
        return
    found: dict[str, object] = {f"{num} rows": host_step(num, options.steps) for num in options.rows}
    rows = " ".join(map(str, options.rows))
    write("host_step", f"python -m benchmarks.host_step --rows {rows} --steps {options.steps}", found)


if __name__ == "__main__":
    main()
