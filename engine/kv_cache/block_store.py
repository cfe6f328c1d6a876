"""Stores the bytes of cache blocks and carries out `Move`s between device blocks, host slots and files.

A block's bytes are its part of every layer, one layer after the other. Host slots are tensors like the cache's own. On
a GPU they are pinned, and copies run in the order of the device's stream, ahead of the step that overwrites their
blocks; only reading or filling a slot from here waits for them. On a CPU a copy has ended when it returns. One thread
writes and reads files, in order, so that a read finds what was written before it. A file carries a checksum over the
identity of what computed it, its layout and its bytes: a file that is damaged, or of another identity or layout, is
reported as lost and never used. Block names are opaque here.
"""

import dataclasses
import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.kv_cache.disk import SUFFIX, UNFINISHED, create, order_files
from sluice_server.engine.kv_cache.identity import UNNAMED, CacheIdentity, framed
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.engine.kv_cache.tiers import Move, MoveKind
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import memory
from sluice_server.kernels.layout.layout import blocks_of, slots_of

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
MAX_WAITING = 64  # writes that wait for the disk at most; further blocks are dropped, so that steps never wait


@dataclasses.dataclass(frozen=True, slots=True)
class _CopyJob:
    move: Move
    wait: Callable[[], None]  # waits for earlier copies that may still use its slot
    data: bytes = b""  # the bytes of a WRITE or KEEP


class BlockStore:
    """Device blocks `cache` (a tensor [blocks, …] per layer), `num_host` slots in host memory, files in `directory`.

    `beside`: layers of another model over the same blocks, which are moved together. `identity`: of what computes them.
    """

    def __init__(
        self,
        cache: list[Tensor],
        num_host: int = 0,
        directory: Path | None = None,
        beside: Sequence[Tensor] = (),
        identity: CacheIdentity = UNNAMED,
    ) -> None:
        self.cache = cache
        self._slots = [*slots_of(cache), *(slots_of(beside) if beside else ())]
        self._all = [*blocks_of(cache), *(blocks_of(beside) if beside else ())]
        self.block_bytes = sum(layer[0].numel() * layer.element_size() for layer in self._all)
        self._host = [_host_like(layer, num_host) for layer in self._all] if num_host else []
        self.num_host = num_host
        self._directory = directory
        self._layout = layout_of(self._all, identity)
        self._shared: SharedSlots | None = None
        self._ended: deque[tuple[Move, bool]] = deque()
        self._jobs: queue.Queue[_CopyJob | None] = queue.Queue()  # None ends the thread
        self._fence = fence_of(cache[0].device)
        self._thread: threading.Thread | None = None
        if directory is not None:
            self._thread = threading.Thread(target=self._serve, name="cache disk", daemon=True)
            self._thread.start()

    def move(self, moves: list[Move]) -> None:
        """Carries out moves in order; those with the disk run in the background."""
        for move in moves:
            match move.kind:
                case MoveKind.COPY:
                    _copy(self._all, move.source, self._all, move.target)
                case MoveKind.SAVE:
                    _copy(self._all, move.source, self._host, move.target)
                case MoveKind.RESTORE:
                    _copy(self._host, move.source, self._all, move.target)
                case MoveKind.OFFER if self._shared is not None:
                    self._shared.write(move.target, move.name, _bytes_in(self._all, move.source))
                case MoveKind.WITHDRAW if self._shared is not None:
                    self._shared.clear(move.target)
                case MoveKind.WRITE | MoveKind.KEEP if self._jobs.qsize() >= MAX_WAITING:
                    self._ended.append((move, False))
                case MoveKind.WRITE | MoveKind.KEEP:
                    self._fence()()
                    layers = self._host if move.kind is MoveKind.WRITE else self._all
                    self._jobs.put(_CopyJob(move, _nothing, _bytes_in(layers, move.source)))
                case _:
                    self._jobs.put(_CopyJob(move, self._fence()))

    @property
    def layout(self) -> bytes:
        """What must be equal for a block's bytes to mean the same."""
        return self._layout

    def share(self, slots: SharedSlots) -> None:
        """Copies blocks that are offered to these slots, from now on."""
        self._shared = slots

    def fill(self, block: int, data: bytes) -> None:
        """Fills a device block with the bytes of another engine's block of the same layout."""
        _fill(self._all, block, data)

    def give_back(self, first: int, end: int) -> int:
        """Gives the memory of device blocks back to the system, on a CPU; returns the bytes. If used again they
        are zero."""
        return sum(memory.give_back(layer[first:end]) for layer in self._all if layer.is_cpu)

    def give_back_host(self, first: int, end: int) -> int:
        """Gives the memory of host slots back to the system, unless it is pinned for a GPU; returns the bytes."""
        return sum(memory.give_back(layer[first:end]) for layer in self._host if not layer.is_pinned())

    def move_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copies tokens to other places in the cache; reads all before it writes. See `kernels.ops.move_slots_`."""
        ops.move_slots_(self._slots, sources, targets)

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the reads and writes that have ended since the last call, each with whether it succeeded."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """Ends the thread after all pending writes. `move` must not be called afterwards."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def finish(self, moves: Sequence[Move], may_go_on: Callable[[], bool]) -> int:
        """Carries out removals and then writes, after `close`, in the caller's thread, until an error or until
        `may_go_on` is false at a write. Returns the number of blocks written."""
        num = 0
        self._fence()()
        for move in moves:
            if move.kind is not MoveKind.REMOVE and not may_go_on():
                break
            layers = self._all if move.kind is MoveKind.KEEP else self._host
            try:
                if move.kind is MoveKind.REMOVE:
                    self._path(move.name).unlink(missing_ok=True)
                    continue
                self._write(move.name, _bytes_in(layers, move.source))
            except OSError as error:
                logger.warning("cache blocks are not saved: %s; their tokens will be computed again", error)
                break
            num += 1
        return num

    def order(self, names: Sequence[bytes]) -> None:
        """Dates files so that `names_on_disk` returns them in this order."""
        assert self._directory is not None
        order_files([self._path(name) for name in names])

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                is_good = self._do(job)
            except OSError as error:
                logger.warning("cache block %s: %s; its tokens will be computed again", job.move.name.hex()[:12], error)
                is_good = False
            if job.move.kind is not MoveKind.REMOVE:
                self._ended.append((job.move, is_good))

    def _do(self, job: _CopyJob) -> bool:
        job.wait()
        if job.move.kind is MoveKind.REMOVE:
            self._path(job.move.name).unlink(missing_ok=True)
        elif job.move.kind in (MoveKind.WRITE, MoveKind.KEEP):
            self._write(job.move.name, job.data)
        else:
            return self._read(self._path(job.move.name), job.move.target)
        return True

    def _path(self, name: bytes) -> Path:
        assert self._directory is not None
        return self._directory / f"{name.hex()}{SUFFIX}"

    def _write(self, name: bytes, data: bytes) -> None:
        """Writes the file of a block; it is there as a whole or not at all."""
        path = self._path(name)
        part = path.with_suffix(UNFINISHED)
        try:
            create(part, self._checksum(data) + data)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _read(self, path: Path, slot: int) -> bool:
        """Fills a host slot from a file. Returns False if the file is not what was written."""
        found = path.read_bytes()
        data = found[DIGEST_BYTES:]
        if len(data) != self.block_bytes or found[:DIGEST_BYTES] != self._checksum(data):
            logger.warning("%s is damaged or of another identity or layout; its tokens will be computed again", path)
            path.unlink(missing_ok=True)
            return False
        _fill(self._host, slot, data)
        return True

    def _checksum(self, data: bytes) -> bytes:
        return hashlib.sha256(self._layout + data).digest()


def layout_of(cache: list[Tensor], identity: CacheIdentity) -> bytes:
    """Returns what must be equal for a block's bytes to mean the same: identity, number format, shape, layers."""
    shapes = repr([(str(layer.dtype), tuple(layer.shape[1:])) for layer in cache])
    return framed((identity.encoded(), shapes.encode()))


def _host_like(layer: Tensor, num: int) -> Tensor:
    pinned = layer.device.type == "cuda"
    return torch.empty((num, *layer.shape[1:]), dtype=layer.dtype, pin_memory=pinned)


def _bytes_in(layers: list[Tensor], block: int) -> bytes:
    return b"".join(layer[block].cpu().contiguous().view(torch.uint8).numpy().tobytes() for layer in layers)


def _fill(layers: list[Tensor], block: int, data: bytes) -> None:
    at = 0
    for layer in layers:
        size = layer[block].numel() * layer.element_size()
        raw = torch.frombuffer(bytearray(data[at : at + size]), dtype=layer.dtype)
        layer[block].copy_(raw.view(layer[block].shape))
        at += size


def _copy(sources: list[Tensor], source: int, targets: list[Tensor], target: int) -> None:
    for one, other in zip(sources, targets, strict=True):
        other[target].copy_(one[source], non_blocking=True)


def fence_of(device: torch.device) -> Callable[[], Callable[[], None]]:
    """Returns a function that, when called, returns a wait for all copies begun until then."""
    if device.type != "cuda":
        return lambda: _nothing

    def fence() -> Callable[[], None]:
        event = torch.Event(device)
        event.record()
        return event.synchronize

    return fence


def _nothing() -> None:
    """Does nothing: on a CPU copies have ended when they return."""
