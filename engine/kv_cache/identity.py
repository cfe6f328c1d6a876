"""The identity of a cache: all that the bits of a block depend on beside its tokens. Blocks of two identities never
mix.

A frozen value, made once when an engine is built. Pure data: no file, no tensor, no request.
"""

import dataclasses
import functools
from collections.abc import Iterable

NUM_KEPT = 16  # identities whose bytes are kept: an engine has one


@dataclasses.dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What computes the blocks. Every field counts, including fields added later.

    Attributes:
        weights: names the content of the checkpoint; empty where blocks do not outlive their engine.
        draft: the kind of speculation and the content of the drafter, whose blocks lie beside; empty without one.
        weights_format: how weights are rounded, and by which observations of their inputs; or the method that the
            checkpoint was quantised with.
        dtype: number format of the computation.
        cache_dtype: number format of keys and values.
        kernels: the kernels that compute, by contract and build.
        plugin: the package, version and code of the model, if that is a plugin's; empty otherwise.
    """

    weights: bytes = b""
    draft: bytes = b""
    weights_format: str = ""
    dtype: str = ""
    cache_dtype: str = ""
    kernels: str = ""
    plugin: str = ""

    def encoded(self) -> bytes:
        """Returns bytes that are equal only for equal identities."""
        return _encoded(self)


@functools.lru_cache(NUM_KEPT)
def _encoded(identity: CacheIdentity) -> bytes:
    """Returns the bytes, which each request of an engine asks for."""
    values = [getattr(identity, field.name) for field in dataclasses.fields(identity)]  # `astuple` would copy each one
    return framed(one.encode() if isinstance(one, str) else one for one in values)


UNNAMED = CacheIdentity()  # for blocks that stay within one process


def framed(fields: Iterable[bytes]) -> bytes:
    """Returns the fields joined, each after its length, so that no two lists of fields give the same bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)
