"""Defines the operations that a gateway asks of one process of the ring, such as a profile, and their answers.

A gateway sends `Operation` with work; the process that it names answers with one `OperationAnswer`, and with one more
for each `Operation` with `More`, so that a slow client holds up nothing on the ring. The last one has `Done` or
`Refused`. As in `services.messages.messages`, every change in this file requires another SCHEMA_VERSION.
"""

import enum
from typing import TypeAlias

import msgspec

from sluice_server.engine.errors import Code, ServiceError

CHUNK_BYTES = 128 << 10  # of one answer: it must fit into a frame, as only messages of requests become blobs


class ProfileKind(enum.StrEnum):
    """What a profile records."""

    TORCH = "torch"  # operators and kernels of an engine's steps
    STACKS = "stacks"  # the call stacks of all threads
    PYTHON_MEMORY = "python-memory"  # allocations of Python objects
    CUDA_MEMORY = "cuda-memory"  # the allocator of a CUDA device


class Profile(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: record a profile of this process, until `seconds` have passed or an engine has computed `num_steps`."""

    kind: ProfileKind
    seconds: float
    num_steps: int = 0  # 0: only time counts
    max_bytes: int = 0  # of the file; a larger one is an error


class More(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The answer before was taken: send the next one."""


class Stop(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The caller is gone: end the operation. It is not answered."""


class ResizeCache(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: resize this engine's cache while it serves; a size that is None stays."""

    tokens: int | None = None
    host_bytes: int | None = None  # of the host tier


class ClearCache(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: forget and wipe what is cached of a tenant's requests, or of all, on every tier of this engine."""

    tenant: str | None = None  # None: all


Work: TypeAlias = Profile | ResizeCache | ClearCache
Asked: TypeAlias = Work | More | Stop


class Recording(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A profile has begun."""


class Chunk(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A part of a profile's file, behind the part before."""

    data: bytes


class Recorded(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A profile's file is complete."""

    seconds: float  # that were recorded
    num_steps: int  # of the engine within them
    size: int  # bytes of the file
    digest: str  # SHA-256 of the file, hex


class CacheResized(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """How far resizing is."""

    tokens: int  # that the cache may hold now
    max_tokens: int  # that it may grow to
    host_bytes: int
    num_left: int  # blocks that are still in the way
    released: int = 0  # bytes that were given back to the system
    is_complete: bool = False


class CacheCleared(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """How far clearing is."""

    num_blocks: int  # that had a name, on all tiers
    num_left: int  # blocks that are still to be wiped now
    num_in_use: int  # blocks that are wiped when their requests end
    is_complete: bool = False


class Refused(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The operation ended with an error."""

    code: int
    reason: str
    message: str
    field: str = ""
    details: dict[str, str] = {}
    retry_after_s: float = 0.0

    @staticmethod
    def of(error: ServiceError) -> "Refused":
        """Returns the answer that carries an error."""
        return Refused(int(error.code), error.reason, error.message, error.field, error.details, error.retry_after_s)

    def error(self) -> ServiceError:
        """Returns the error that it carries; an unknown code becomes INTERNAL."""
        code = Code(self.code) if self.code in Code._value2member_map_ else Code.INTERNAL
        more = {"field": self.field, "details": self.details}
        return ServiceError(code, self.reason, self.message, retry_after_s=self.retry_after_s, **more)  # type: ignore[arg-type] # mixed values


class Done(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The operation has ended; no answer follows."""


Progress: TypeAlias = Recording | Chunk | Recorded | CacheResized | CacheCleared
Answer: TypeAlias = Progress | Refused | Done


class Operation(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → the process `target`, round the ring: what it is to do. `number`: of the answer that is wanted."""

    origin: str
    epoch: int  # boot epoch of the origin
    call: int  # number of the operation at its origin
    target: str
    work: Asked
    number: int = 0


class OperationAnswer(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """The process `source` → the gateway that asked, round the ring. `number`: of the answer, from 0; a gap means
    loss."""

    origin: str
    epoch: int
    call: int
    source: str
    number: int
    value: Answer
