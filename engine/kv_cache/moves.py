"""Transfers of cache blocks between tiers: decided by bookkeeping, and carried out by a runner in their order."""

import dataclasses
import enum


class MoveKind(enum.Enum):
    """The source and target of a move."""

    COPY = enum.auto()  # device block → device block
    SAVE = enum.auto()  # device block → host slot
    RESTORE = enum.auto()  # host slot → device block
    KEEP = enum.auto()  # device block → disk: in the background, or after the last step
    WRITE = enum.auto()  # host slot → disk, in the background; the slot may be reused at once
    READ = enum.auto()  # disk → host slot, in the background; the slot is not touched until it ends
    FETCH = enum.auto()  # store of the host → host slot, in the background, like READ
    REMOVE = enum.auto()  # deletes from disk
    OFFER = enum.auto()  # device block → shared slot, which other engines read
    WITHDRAW = enum.auto()  # clears a shared slot
    WIPE = enum.auto()  # fills a device block with zeros
    WIPE_SLOT = enum.auto()  # fills a host slot with zeros
    CLEAR = enum.auto()  # deletes all of an owner from disk, in the background


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One transfer. `source` and `target` are block or slot numbers; `name` is the name of the block on disk or in the
    store, of one that is offered, or of an owner."""

    kind: MoveKind
    source: int = -1
    target: int = -1
    name: bytes = b""
