"""The rights of root over files, taken from a test for a while: without them a file's mode counts for root too."""

import contextlib
import ctypes
from collections.abc import Iterator

VERSION = 0x20080522  # of the structures of capget and capset
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def modes_count() -> Iterator[None]:
    """Lets modes of files count for this thread, also where root runs it. On Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (
        (ctypes.c_uint32 * 2)(VERSION, 0),
        (ctypes.c_uint32 * 6)(),
    )  # effective, permitted, inheritable; twice
    assert libc.capget(header, rights) == 0
    before = rights[0]
    rights[0] = before & ~OVERRIDES
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0
