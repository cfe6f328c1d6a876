"""Stores the bytes of cache blocks and carries out `Move`s between device blocks, host slots and files.

A block's bytes are its part of every layer, one layer after the other. Host slots are tensors like the cache's own. On
a GPU they are pinned, and copies run in the order of the device's stream, ahead of the step that overwrites their
blocks; only reading or filling a slot from here waits for them. On a CPU a copy has ended when it returns. One thread
writes and reads files, in order, so that a read finds what was written before it; another reads the store of the host,
if there is one. Block names are opaque here.
"""

import dataclasses
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.kv_cache.block_files import BlockFile, BlockFiles
from sluice_server.engine.kv_cache.identity import UNNAMED, CacheIdentity, framed
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.engine.kv_cache.store_reads import StoreBlocks, StoreReads
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import memory
from sluice_server.kernels.layout.layout import blocks_of, slots_of

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # writes that wait for the disk at most; further blocks are dropped, so that steps never wait


@dataclasses.dataclass(frozen=True, slots=True)
class _CopyJob:
    move: Move
    wait: Callable[[], None]  # waits for earlier copies that may still use its slot
    data: bytes = b""  # the bytes of a WRITE or KEEP


class _ListJob:
    """Looks at what is on disk."""


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
        self._layout = layout_of(self._all, identity)
        self._files = None if directory is None else BlockFiles(directory, self._layout, self.block_bytes)
        self._listing: list[BlockFile] | None = None
        self._shared: SharedSlots | None = None
        self._fetching: StoreReads | None = None
        self._ended: deque[tuple[Move, bool]] = deque()
        self._jobs: queue.Queue[_CopyJob | _ListJob | None] = queue.Queue()  # None ends the thread
        self._fence = fence_of(cache[0].device)
        self._thread: threading.Thread | None = None
        if self._files is not None:
            self._thread = threading.Thread(target=self._serve, args=(self._files,), name="cache disk", daemon=True)
            self._thread.start()

    def move(self, moves: list[Move]) -> None:
        """Carries out moves in order; those with the disk and the store run in the background."""
        fetched = [move for move in moves if move.kind is MoveKind.FETCH]
        for move in moves:
            if move.kind is not MoveKind.FETCH:
                self._begin(move)
        if fetched and self._fetching is not None:
            self._fetching.begin(fetched)  # what was in their slots has been copied
        else:
            self._ended.extend((move, False) for move in fetched)

    def _begin(self, move: Move) -> None:
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
            case MoveKind.WIPE | MoveKind.WIPE_SLOT:
                _wipe(self._all if move.kind is MoveKind.WIPE else self._host, move.target)
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

    def fetch_from(self, source: StoreBlocks, worth_s: Callable[[int], float]) -> None:
        """Reads blocks of the store of the host from `source`, from now on; on a CPU. `worth_s`: see `StoreReads`."""
        fill, ended = partial(_fill, self._host), self._ended.append
        self._fetching = StoreReads(source, fill, ended, worth_s)

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

    def list_files(self) -> None:
        """Looks at what is on disk, in the background, behind the transfers that have begun."""
        self._jobs.put(_ListJob())

    def take_listing(self) -> list[BlockFile] | None:
        """Returns what the last look has found, oldest first, once; None before it has ended."""
        found, self._listing = self._listing, None
        return found

    def close(self) -> None:
        """Ends the threads after all pending writes and reads. `move` must not be called afterwards."""
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def finish(self, moves: Sequence[Move], may_go_on: Callable[[], bool]) -> int:
        """Carries out removals and then writes, after `close`, in the caller's thread, until an error or until
        `may_go_on` is false at a write. Returns the number of blocks written."""
        num, files = 0, self._files
        assert files is not None, "there is no disk"
        self._fence()()
        for move in moves:
            if move.kind is not MoveKind.REMOVE and not may_go_on():
                break
            layers = self._all if move.kind is MoveKind.KEEP else self._host
            try:
                if move.kind is MoveKind.REMOVE:
                    files.remove(move.name)
                    continue
                files.write(move.name, _bytes_in(layers, move.source))
            except OSError as error:
                logger.warning("cache blocks are not saved: %s; their tokens will be computed again", error)
                break
            num += 1
        return num

    def order(self, names: Sequence[bytes]) -> None:
        """Dates files so that they are listed in this order."""
        assert self._files is not None, "there is no disk"
        self._files.order(names)

    def _serve(self, files: BlockFiles) -> None:
        """Carries out jobs until there are no more. Of failures between two writes, the first has a line."""
        is_told = False
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _ListJob):
                self._list(files)
                continue
            try:
                is_good = self._do(job, files)
                is_told = is_told and not (is_good and job.move.kind in (MoveKind.WRITE, MoveKind.KEEP))
            except OSError as error:
                if not is_told:
                    name = job.move.name.hex()[:12]
                    logger.warning("cache block %s: %s; its tokens will be computed again", name, error)
                is_good, is_told = False, True
            if job.move.kind is not MoveKind.REMOVE:
                self._ended.append((job.move, is_good))

    def _do(self, job: _CopyJob, files: BlockFiles) -> bool:
        job.wait()
        move = job.move
        match move.kind:
            case MoveKind.REMOVE:
                files.remove(move.name)
            case MoveKind.CLEAR:
                files.clear(move.name)
            case MoveKind.WRITE | MoveKind.KEEP:
                files.write(move.name, job.data)
            case _:
                data = files.read(move.name)
                if data is None:
                    return False
                _fill(self._host, move.target, data)
        return True

    def _list(self, files: BlockFiles) -> None:
        try:
            self._listing = files.listed()
        except OSError as error:
            logger.warning("the cache's directory cannot be read: %s", error)
            self._listing = []  # what cannot be read is of no use


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


def _wipe(layers: list[Tensor], block: int) -> None:
    for layer in layers:
        layer[block].zero_()


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
