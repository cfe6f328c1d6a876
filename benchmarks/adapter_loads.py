"""Measures what a cold load of an adapter is of other streams' gaps; a part of `benchmarks.adapters`."""

import math
import os
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

from benchmarks.adapter_rig import CLOCKS, RANK, Clock, asking, make_engine, tell, write_adapters
from benchmarks.cpu.shapes import checkpoint
from benchmarks.machine import median
from sluice_server.engine.adapters.loader import LoadedAdapter
from sluice_server.engine.engine import Engine

STREAMS = 8
GAPS = 300  # between tokens of a stream
EVERY_S = 0.5  # between the beginnings of two loads
NUM = 16  # adapters that are loaded by turns


def forget(folder: Path) -> None:
    """Has the system forget what it has cached of the files in a folder, so that they are read from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class ColdLoads:
    """Loads one adapter after the other from the disk, as calls of LoadAdapter would, and drops the one before."""

    def __init__(self, engine: Engine, folder: Path, num: int) -> None:
        assert engine.adapters is not None
        self.took_s: list[float] = []  # of each load, until the engine had it
        self._manager, self._folder, self._num = engine.adapters, folder, num
        self._reading: Future[LoadedAdapter] | None = None
        self._last: bytes | None = None
        self._begun_s = -math.inf

    def prepare(self) -> None:
        """Has the system forget the files: no adapter is loaded twice in one run."""
        for index in range(self._num):
            forget(self._folder / str(index))

    def turn(self) -> None:
        """Begins a load if one is due, and takes one that has ended."""
        now_s = time.perf_counter()
        if self._reading is None and now_s - self._begun_s >= EVERY_S:
            name, self._begun_s = str(len(self.took_s) % self._num), now_s
            self._reading = self._manager.read(name)
        elif self._reading is not None and self._reading.done():
            self.end()

    def end(self) -> None:
        """Waits for a load that is under way, and takes it."""
        if self._reading is not None:
            loaded, self._reading = self._reading.result(), None
            self._manager.add(loaded, is_pinned=False)
            if self._last is not None:
                self._manager.drop(self._last)
            self._last = loaded.digest
            self.took_s.append(time.perf_counter() - self._begun_s)


def gaps_of(engine: Engine, loads: ColdLoads | None, clock: Clock) -> list[float]:
    """The seconds from each token to the next of eight streams of the base, shortest first."""
    if loads is not None:
        loads.prepare()
    for at in range(STREAMS):
        engine.add(asking(f"{at:032x}", None, GAPS))
    gaps, last = [], None
    while engine.has_work:
        if loads is not None:
            loads.turn()
        is_whole = len(engine.step().sampled) == STREAMS
        now = clock()
        if last is not None and is_whole:
            gaps.append(now - last)
        last = now if is_whole else None
    if loads is not None:
        loads.end()
    return sorted(gaps)


def loading(shape: str, rounds: int, threads: int, clock: Clock) -> dict[str, object]:
    """Gaps between tokens of eight base streams while an adapter is loaded from the disk every half second, over gaps
    without loads."""
    own = clock if clock is CLOCKS["wall"] else time.process_time
    with tempfile.TemporaryDirectory(dir=checkpoint(shape)) as folder:
        write_adapters(Path(folder), shape, NUM, RANK)
        engine = make_engine(shape, threads, Path(folder))
        loads = ColdLoads(engine, Path(folder), NUM)
        ratios: dict[str, list[float]] = {"p50": [], "p99": [], "longest": []}
        for number in range(rounds + 1):
            without, beside = gaps_of(engine, None, own), gaps_of(engine, loads, own)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
                at = min(len(without) - 1, int(len(without) * share))
                if number:
                    ratios[name].append(beside[at] / without[at])
            tell(f"round {number} of {rounds}: p99 gap {without[-1 - len(without) // 100] * 1e3:.1f} ms without loads")
        return {
            "gap while adapters are loaded over without": {
                name: {"median": round(median(one), 3), "rounds": [round(ratio, 2) for ratio in one]}
                for name, one in ratios.items()
            },
            "loads": len(loads.took_s),
            "seconds of a load": round(median(loads.took_s), 3),
        }
