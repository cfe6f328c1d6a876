"""Stages whose ranks are processes of one host, over memory that all ranks of the group share.

Rank 0 makes the memory (`new_stages`) and passes its descriptor, as with the memory of sums. A rank writes what it
sends into two pieces in turn, and the rank behind it copies them. While a rank waits it looks at the life of all ranks,
and at their progress: a stage may take long, but one that computes nothing is stuck.

Every word has one writer. What is written before a word is seen before it, as x86 processors keep stores in order.
"""

import contextlib
import fcntl
import os
import secrets
import struct
import time
from collections.abc import Callable
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import StageFailed
from sluice_server.engine.parallel.sums import TIMEOUT_S, SumsBroken

PIECE_FLOATS = 1 << 18  # 1 MiB; more are sent piece by piece
PIECES = 2
LINE = 8  # words of 8 bytes
MAGIC = 0x65676174
PROGRESS, PROCESS, BROKEN, WRITTEN, READ = range(5)  # words of a rank's line
SPINS, YIELDS = 200, 200  # looks at a word before a rank yields, and before it sleeps
SLEEP_S, LOOK_S = 5e-5, 2e-3  # between looks at a word, and at other ranks
_PROCESS = secrets.randbits(40)  # containers may count their processes from 1 each
_LOCK = struct.Struct("hhqqi0q")  # struct flock


def new_stages(shape: ParallelShape) -> int:
    """Returns the descriptor of memory for a group's stages. Its size cannot be changed any more."""
    file = os.memfd_create("sluice-stages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8 * _words(shape))
    os.pwrite(file, struct.pack("3q", MAGIC, shape.tensor_size, shape.pipeline_size), 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def _words(shape: ParallelShape) -> int:
    """Returns the words of the memory: a line, one for each rank, and the pieces of each rank that sends."""
    senders = shape.members - shape.tensor_size
    return LINE * (1 + shape.members) + senders * PIECES * (LINE + PIECE_FLOATS // 2)


class SharedMemoryStages:
    """Implements `Stages` over shared memory."""

    def __init__(self, file: int, shape: ParallelShape, timeout_s: float = TIMEOUT_S) -> None:
        """Takes a descriptor for its own; no other descriptor of the memory may be closed in this process.

        Raises ValueError for memory of another group, or that has this rank already.
        """
        if os.pread(file, 24, 0) != struct.pack("3q", MAGIC, shape.tensor_size, shape.pipeline_size):
            raise ValueError("this file is no memory for the stages of this group")
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self._file = file
        self._own = shape.member
        self._before = None if shape.is_first else shape.member + shape.tensor_size  # ranks of the last stage are first
        self._behind = None if shape.is_last else shape.member - shape.tensor_size
        self._first_sender = shape.tensor_size
        self._memory = np.frombuffer(mmap(file, 0), dtype=np.int64)
        self._lines = self._memory[LINE : LINE * (1 + shape.members)].reshape(shape.members, LINE)
        self._pieces = self._memory[LINE * (1 + shape.members) :].reshape(-1, PIECES, LINE + PIECE_FLOATS // 2)
        self._launch = 0
        self._has_received = self._has_sent = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._own)
        except OSError:
            raise ValueError(f"rank {self._own} of this group is there already, in another process") from None
        self._lines[self._own, PROCESS] = (_PROCESS << 22 | os.getpid() & (1 << 22) - 1) + 1

    def begin(self) -> None:
        """Implements `Stages.begin`."""
        self._launch += 1
        self._has_received, self._has_sent = self._before is None, self._behind is None

    def receive(self, rows: int, width: int, on_progress: Callable[[], None]) -> Tensor:
        """Implements `Stages.receive`."""
        states = torch.empty(rows, width)
        given = self._receive(states, on_progress)
        if given != (rows, width):
            text = f"rank {self._before} sends hidden states {list(given)}, and rank {self._own} takes {[rows, width]}"
            raise self._broken(self._before or 0, text)
        return states

    def send(self, states: Tensor, on_progress: Callable[[], None]) -> None:
        """Implements `Stages.send`."""
        rows, width = states.shape
        flat = states.contiguous().view(-1)
        for begin in range(0, max(1, len(flat)), PIECE_FLOATS):
            self._put((rows, width), begin, flat[begin : begin + PIECE_FLOATS], on_progress)
        self._has_sent = True

    def note_progress(self) -> None:
        """Implements `Stages.note_progress`."""
        self._lines[self._own, PROGRESS] += 1

    def settle(self) -> None:
        """Implements `Stages.settle`."""
        if not self._has_received:
            with contextlib.suppress(StageFailed):
                self._receive(None, _nothing)
        if not self._has_sent:
            self._put((-1, 0), 0, torch.empty(0), _nothing)
            self._has_sent = True

    def end(self) -> None:
        """Tells the others that this rank goes on no more: they raise SumsBroken where they wait."""
        self._lines[self._own, BROKEN] = 1 + self._own

    def _receive(self, into: Tensor | None, on_progress: Callable[[], None]) -> tuple[int, int]:
        """Takes one result of the stage before, into a tensor if it has its size, and returns its size."""
        assert self._before is not None, "the first stage receives nothing"
        done, begin = self._lines[self._own], 0
        while True:
            self._wait(lambda: int(self._lines[self._before, WRITTEN]) > int(done[READ]), self._before, on_progress)
            piece = self._pieces[self._before - self._first_sender, int(done[READ]) % PIECES]
            launch, rows, width, at = (int(one) for one in piece[:4])
            if (launch, at) != (self._launch, begin):
                text = f"rank {self._before} is at launch {launch}, rank {self._own} at {self._launch}"
                raise self._broken(self._before, text)
            num = min(PIECE_FLOATS, max(rows, 0) * width - begin)
            if into is not None and into.shape == (rows, width):
                into.view(-1)[begin : begin + num] = _floats(piece, num)
            done[READ] += 1
            begin += num
            if rows < 0 or begin >= rows * width:
                break
        self._has_received = True
        if rows < 0:
            raise StageFailed(f"a stage before that of rank {self._own} failed")
        return rows, width

    def _put(self, size: tuple[int, int], begin: int, values: Tensor, on_progress: Callable[[], None]) -> None:
        """Gives one piece of a result to the next stage."""
        assert self._behind is not None, "the last stage sends nothing"
        own, behind = self._lines[self._own], self._lines[self._behind]
        self._wait(lambda: int(own[WRITTEN]) - int(behind[READ]) < PIECES, self._behind, on_progress)
        piece = self._pieces[self._own - self._first_sender, int(own[WRITTEN]) % PIECES]
        piece[:4] = (self._launch, *size, begin)
        _floats(piece, len(values)).copy_(values)
        own[WRITTEN] += 1

    def _wait(self, is_there: Callable[[], bool], other: int, on_progress: Callable[[], None]) -> None:
        """Waits for another rank. Raises SumsBroken if a rank has ended or none makes progress."""
        for _ in range(SPINS):
            if is_there():
                return
        start = time.monotonic()
        until_s, looked_s, seen, turns = start + self.timeout_s, start, self._progress(), 0
        while not is_there():
            turns += 1
            time.sleep(0.0 if turns < YIELDS else SLEEP_S)
            now_s = time.monotonic()
            if now_s - looked_s < LOOK_S:
                continue
            looked_s, found = now_s, self._progress()
            if found != seen:
                seen, until_s = found, now_s + self.timeout_s
                on_progress()
            self._look(is_there)
            if now_s > until_s and not is_there():
                text = f"rank {other} has not come for {self.timeout_s:g} s, and no rank computes: it is stuck"
                raise self._broken(other, text)
        self.seconds += time.monotonic() - start

    def _progress(self) -> int:
        return int(self._lines[:, PROGRESS].sum())

    def _look(self, is_there: Callable[[], bool]) -> None:
        """Raises SumsBroken if a rank has ended or given up, unless what is awaited is there: it came before."""
        ended = next((rank for rank in range(len(self._lines)) if not self._is_alive(rank)), None)
        broken = int(self._lines[:, BROKEN].max())
        if (ended is None and not broken) or is_there():
            return
        if ended is not None:
            raise self._broken(ended, f"rank {ended} has ended")
        raise self._broken(broken - 1, f"rank {broken - 1} has given up")

    def _is_alive(self, rank: int) -> bool:
        """Returns whether the process of a rank holds its lock, or has not come yet."""
        process = int(self._lines[rank, PROCESS])
        if not process or process == int(self._lines[self._own, PROCESS]):
            return True
        asked = fcntl.fcntl(self._file, fcntl.F_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        return bool(_LOCK.unpack(asked)[0] != fcntl.F_UNLCK)

    def _broken(self, rank: int, text: str) -> SumsBroken:
        self._lines[self._own, BROKEN] = 1 + rank
        return SumsBroken(rank, f"{text}: start the group anew")


def _floats(piece: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", num: int) -> Tensor:
    return torch.from_numpy(piece[LINE:].view(np.float32))[:num]


def _nothing() -> None:
    """Does nothing about progress."""
