"""What the bits of a cache block depend on, beside its tokens: blocks of two identities are never taken for each other.

One value, made once where an engine is built. Pure data: knows no file, no tensor and no request.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Every field counts, also those that are added.

    Attributes:
        weights: names the content of the checkpoint; empty where blocks do not outlive their engine.
        draft: the kind of speculation and the content of what drafts, whose blocks lie beside; empty without one.
        weights_format: how weights are rounded, or the method that the checkpoint was quantised with.
        dtype: that is computed in.
        cache_dtype: of keys and values.
        kernels: what computes, by contract and build.
    """

    weights: bytes = b""
    draft: bytes = b""
    weights_format: str = ""
    dtype: str = ""
    cache_dtype: str = ""
    kernels: str = ""

    def encoded(self) -> bytes:
        """The same bytes for equal identities only."""
        return framed(one.encode() if isinstance(one, str) else one for one in dataclasses.astuple(self))


UNNAMED = CacheIdentity()  # of blocks that are kept in one process


def framed(fields: Iterable[bytes]) -> bytes:
    """The fields, each behind its length: no two sequences give the same bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)
