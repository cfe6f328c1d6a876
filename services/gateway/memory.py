"""Memory of a gateway's threads: one heap for all of them. Knows nothing else."""

import contextlib
import ctypes

M_ARENA_MAX = -8  # of glibc's mallopt


def share_one_heap() -> None:
    """Have malloc give all threads memory from one heap, from here on; other C libraries than glibc have but one.

    grpc's threads free what the loop's thread made and the other way round, so that heaps of their own only leave
    holes: after 7,000 cancelled requests a gateway still grew by 700 bytes a request, of which 120 were in use. With
    one heap it grew by 150.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
