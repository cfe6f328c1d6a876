"""Rows of images, and positions in three directions, as messages from rank 0, which alone computes vision towers."""

from collections.abc import Iterator, Sequence

import torch

from sluice_server.engine.models.given import GivenRows
from sluice_server.engine.parallel.messages import GiveRows

PIECE_BYTES = 16 << 20  # of one message


def rows_as_told(given: Sequence[GivenRows], most_bytes: int = PIECE_BYTES) -> Iterator[GiveRows]:
    """Yields the rows of a step, in pieces of so many bytes, and of one row at least."""
    for first, rows in given:
        width = rows.shape[1]
        num = max(1, most_bytes // (rows.itemsize * width))
        for at, piece in zip(range(first, first + len(rows), num), rows.split(num), strict=True):
            yield GiveRows(at, width, piece.contiguous().numpy().tobytes())


def rows_of(told: GiveRows) -> GivenRows:
    """Returns the rows of a message, float32 [N, width]."""
    return told.first, torch.frombuffer(bytearray(told.rows), dtype=torch.float32).view(-1, told.width)


def turned_as_told(turned: Sequence[GivenRows]) -> list[tuple[int, bytes]]:
    """Returns positions int64 [3, N] with the index of the first token of each."""
    return [(first, positions.contiguous().numpy().tobytes()) for first, positions in turned]


def turned_of(told: Sequence[tuple[int, bytes]]) -> list[GivenRows]:
    """Returns the positions of a message."""
    return [(first, torch.frombuffer(bytearray(data), dtype=torch.int64).view(3, -1)) for first, data in told]
