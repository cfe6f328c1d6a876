"""Keeps the weights of offloaded layers in a file, mapped into memory: for a CPU.

The file has the weights as they are packed, and no name, so that nobody changes it and it goes with the process. A
thread asks the system for the next layer while one is computed, and lets go of the one before: two layers at a time
are mapped. What the system keeps of the file in its page cache beside that it drops first when memory is short, also
under the limit of a control group.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.runs import RunLayer
from sluice_server.engine.models.offload.choice import WINDOW, unusable
from sluice_server.engine.models.offload.store import ArrivingLayer, OffloadFigures
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.kernels.cpu.memory import LINE
from sluice_server.kernels.formats.linear import NativeLinear

MADV_POPULATE_READ = 22  # of Linux 5.14: reads and maps pages


class MappedWeights:
    """A part of a file that is mapped into memory."""

    def __init__(self, file: int, first: int, size: int) -> None:
        """Maps `size` bytes from `first`, a multiple of the page size."""
        # Writes would stay private: torch takes no read-only memory, and nothing writes.
        self._memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=first)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        # Else what was read twice counts as memory that is needed, in the control group and for the memory watch: all
        # of a file of 144 MiB after 40 steps, and 12 MiB of it so.
        self._memory.madvise(mmap.MADV_SEQUENTIAL)

    def fetch(self) -> None:
        """Reads it into memory, and returns when it is there; on older systems, begins to."""
        where = ctypes.c_void_p(self.bytes.data_ptr()), ctypes.c_size_t(len(self._memory))
        if ctypes.CDLL(None).madvise(*where, MADV_POPULATE_READ):  # in C, as others run meanwhile
            self._memory.madvise(mmap.MADV_WILLNEED)

    def drop(self) -> None:
        """Lets go of its memory; it is read again when it is used."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class FileStore:
    """Keeps some layers' weights in a file; see `LayerStore`."""

    def __init__(self, folder: Path, layers: Collection[int]) -> None:
        """`folder` is made if needed. Raises ServiceError if no file can be made in it."""
        if sys.platform != "linux":
            raise unusable("needs Linux on a CPU: leave it out")
        self._folder, self._layers = folder, layers
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 # see `close`
        except OSError as error:
            raise self._unwritable(error) from error
        self._parts: list[MappedWeights] = []
        self._size = 0
        self._figures = OffloadFigures("file")
        self.figures: OffloadFigures | None = self._figures
        self._thread = ThreadPoolExecutor(1, "weights")
        self._coming: Future[None] | None = None
        self._next = 0
        self._held: frozenset[int] = frozenset()  # parts in memory; the thread's own

    def keep(self, index: int, layer: DecoderLayer) -> RunLayer:
        """Implements `LayerStore.keep`. Raises ServiceError for weights that are not in the form of this package's
        kernels, and for a disk that is full."""
        if index not in self._layers:
            return layer
        linears = [one for one in layer.matrices if isinstance(one, NativeLinear)]
        if len(linears) < len(layer.matrices):
            raise unusable("only weights of this package's own CPU kernels can be offloaded: leave it out")
        try:
            part = self._written([one.weight for one in linears])
        except OSError as error:
            raise self._unwritable(error) from error
        first = 0
        for one in linears:
            old, size = one.weight, one.weight.nbytes
            one.weight = part.bytes[first : first + size].view(old.dtype).view(old.shape)
            first += _aligned(size, LINE)
            del old
        number = len(self._parts)
        self._parts.append(part)
        give_back()
        return ArrivingLayer(layer, lambda: self.reach(number))

    def finish(self) -> tuple[str, ...]:
        """Implements `LayerStore.finish`."""
        window = sum(sorted((len(one.bytes) for one in self._parts), reverse=True)[:WINDOW])
        what = f"the weights of {len(self._parts)} layers, {self._size >> 20} MiB, are read at each step from a file in"
        return (f"--weights-offload-bytes: {what} {self._folder}, through {window >> 20} MiB of memory",)

    def close(self) -> None:
        """Implements `LayerStore.close`: what is mapped stays."""
        self._file.close()

    def reach(self, number: int) -> None:
        """Waits until the weights of the layer that was kept as `number` are in memory, lets go of those of the layer
        before, and asks for those of the next one."""
        if self._coming is None or number != self._next:  # a step before this one was not computed to its end
            self._ask(number)
        assert self._coming is not None
        start = time.perf_counter()
        self._coming.result()
        self._figures.waited_s += time.perf_counter() - start
        self._next = (number + 1) % len(self._parts)
        self._ask(number, self._next)

    def _ask(self, *wanted: int) -> None:
        self._coming = self._thread.submit(self._hold, frozenset(wanted))

    def _hold(self, wanted: frozenset[int]) -> None:
        """Has these layers in memory and no others; runs on the thread, behind what was asked before."""
        for number in self._held - wanted:
            self._parts[number].drop()
        for number in wanted - self._held:
            self._parts[number].fetch()
        self._held = wanted

    def _written(self, weights: Sequence[Tensor]) -> MappedWeights:
        """Writes the weights of a layer behind those before, and maps them. Raises OSError."""
        file, first = self._file.fileno(), self._size
        size = _aligned(sum(_aligned(one.nbytes, LINE) for one in weights), mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(file, first, size)
        at = first
        for one in weights:
            left = one.contiguous().view(-1).view(torch.uint8).numpy().data
            while left:
                done = os.pwrite(file, left, at)
                left, at = left[done:], at + done
            at = _aligned(at, LINE)
        os.fdatasync(file)  # the system can drop only what is on the disk
        self._size += size
        self._figures.num_bytes += sum(one.nbytes for one in weights)
        return MappedWeights(file, first, size)

    def _unwritable(self, error: OSError) -> Exception:
        text = f"cannot write to {self._folder} ({error.strerror}): set XDG_CACHE_HOME to a folder with more room"
        return unusable(text)


def offload_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder for the files, in the user's cache folder. Raises ServiceError if there is none."""
    given = environment.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if given else Path.home() / ".cache"
    except RuntimeError as error:  # no HOME, and the user has no entry in the system's table
        raise unusable("there is no home directory to keep weights in: set XDG_CACHE_HOME") from error
    if not base.is_absolute():
        raise unusable(f"XDG_CACHE_HOME is {given}, which is no absolute path")
    return base / "sluice" / "offload"


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step
