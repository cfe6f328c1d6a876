"""Stages of several hosts: a rank sends hidden states to a rank of the next stage over the sockets of the group.

A rank that waits is told of the progress of earlier stages: one of them may take long, but where none computes anything
the group is stuck. Pieces have the number of their launch, so that what is left of one that failed is not taken.
"""

import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sluice_server.engine.errors import RankLost
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import StageFailed
from sluice_server.engine.parallel.sums import TIMEOUT_S, SumsBroken
from sluice_server.services.ranks.sockets import RankSockets

PIECE_FLOATS = 1 << 20  # 4 MiB; more are sent piece by piece
LOOK_S = 0.5  # between looks at the clock while nothing comes
PROGRESS_S = 0.25  # between two notes of progress
FAILED, PROGRESS = -1, -2  # in the place of a number of rows
_HEADER = struct.Struct("!qqqq")


def next_rank(shape: ParallelShape, ids: tuple[str, ...]) -> str:
    """Returns the id of the rank of the next stage to which a rank sends; "" on the last stage."""
    return "" if shape.is_last else ids[shape.member - shape.tensor_size]


class _Piece(NamedTuple):
    launch: int
    rows: int
    width: int
    begin: int
    floats: Tensor


class SocketStages:
    """Implements `Stages` over sockets.

    Attributes:
        timeout_s: without progress of an earlier stage, until the group is given up.
        seconds: spent waiting since start.
    """

    def __init__(
        self, sockets: RankSockets, shape: ParallelShape, ids: tuple[str, ...], timeout_s: float = TIMEOUT_S
    ) -> None:
        """`ids` of all ranks of the group, in their order."""
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self._sockets = sockets
        self._before = -1 if shape.is_first else shape.member + shape.tensor_size  # ranks of the last stage are first
        self._behind = next_rank(shape, ids)
        self._launch = 0
        self._has_sent = True
        self._noted_s = 0.0

    def begin(self) -> None:
        """Implements `Stages.begin`."""
        self._launch += 1
        self._has_sent = not self._behind

    def receive(self, rows: int, width: int, on_progress: Callable[[], None]) -> Tensor:
        """Implements `Stages.receive`."""
        start = time.monotonic()
        states = torch.empty(rows, width)
        flat, num = states.view(-1), 0
        try:
            while num < len(flat):
                piece = self._take(on_progress)
                if (piece.rows, piece.width, piece.begin) != (rows, width, num) or num + len(piece.floats) > len(flat):
                    sizes = f"[{piece.rows}, {piece.width}] from {piece.begin}, not [{rows}, {width}] from {num}"
                    raise _broken(self._before, f"rank {self._before} sends hidden states {sizes}")
                flat[num : num + len(piece.floats)] = piece.floats
                num += len(piece.floats)
        finally:
            self.seconds += time.monotonic() - start
        return states

    def send(self, states: Tensor, on_progress: Callable[[], None]) -> None:
        """Implements `Stages.send`."""
        rows, width = states.shape
        flat = states.contiguous().view(-1)
        for begin in range(0, len(flat), PIECE_FLOATS):
            piece = flat[begin : begin + PIECE_FLOATS].numpy().tobytes()
            self._put(_HEADER.pack(self._launch, rows, width, begin) + piece)
        self._has_sent = True

    def note_progress(self) -> None:
        """Implements `Stages.note_progress`: tells the next stage, but not each time."""
        now_s = time.monotonic()
        if self._behind and now_s - self._noted_s >= PROGRESS_S:
            self._noted_s = now_s
            self._put(_HEADER.pack(self._launch, PROGRESS, 0, 0))

    def settle(self) -> None:
        """Implements `Stages.settle`: what was not taken has the number of an earlier launch in the next one."""
        if not self._has_sent:
            self._put(_HEADER.pack(self._launch, FAILED, 0, 0))
            self._has_sent = True

    def _put(self, data: bytes) -> None:
        try:
            self._sockets.send_states(self._behind, data)
        except RankLost as error:
            raise _broken(-1, str(error)) from error

    def _take(self, on_progress: Callable[[], None]) -> _Piece:
        """Returns the next piece of this launch. Raises StageFailed for a failure in its place."""
        until_s = time.monotonic() + self.timeout_s
        while True:
            piece = self._next()
            if piece is None:
                if time.monotonic() > until_s:
                    text = f"rank {self._before} has not come for {self.timeout_s:g} s, and no earlier stage computes"
                    raise _broken(self._before, f"{text}: it is stuck")
            elif piece.launch > self._launch:
                text = f"rank {self._before} is at launch {piece.launch}, this rank at {self._launch}"
                raise _broken(self._before, text)
            elif piece.rows == PROGRESS:
                until_s = time.monotonic() + self.timeout_s
                on_progress()
                self.note_progress()
            elif piece.launch < self._launch:
                continue
            elif piece.rows == FAILED:
                raise StageFailed(f"rank {self._before} could not compute launch {self._launch}")
            else:
                return piece

    def _next(self) -> _Piece | None:
        try:
            data = self._sockets.receive_states(LOOK_S)
        except RankLost as error:
            raise _broken(-1, str(error)) from error
        if data is None:
            return None
        if len(data) < _HEADER.size or (len(data) - _HEADER.size) % 4:
            raise _broken(self._before, f"rank {self._before} sends {len(data)} bytes that are no hidden states")
        launch, rows, width, begin = _HEADER.unpack_from(data)
        rest = bytearray(data[_HEADER.size :])
        floats = torch.frombuffer(rest, dtype=torch.float32) if rest else torch.empty(0)
        return _Piece(launch, rows, width, begin, floats)


def _broken(rank: int, text: str) -> SumsBroken:
    return SumsBroken(rank, f"{text}: start the group anew")
