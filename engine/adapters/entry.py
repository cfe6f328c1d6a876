"""An adapter on the shelf: where its copies are, and the orders that move them.

Pure: no tensors, files, requests or clock.
"""

import dataclasses
import enum


class OrderKind(enum.Enum):
    """What an order does. Reads and loads run in the background and end with `Shelf.ended`."""

    READ = enum.auto()  # disk → host bytes; with a slot, which is then in host memory: disk → slot
    LOAD = enum.auto()  # host bytes → device slot; neither is touched until it ends
    FORGET = enum.auto()  # drops the host bytes
    FREE = enum.auto()  # empties the device slot


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """One order for an adapter; `slot`: the one that is filled or emptied, -1 where none is."""

    kind: OrderKind
    digest: bytes
    slot: int = -1


class Copy(enum.Enum):
    """The state of an adapter's copy in one tier."""

    NONE = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


@dataclasses.dataclass(slots=True)
class Entry:
    """An adapter on the shelf.

    Attributes:
        refs: the sequences that run with it.
        is_fresh: whether nothing has run with it since it was loaded. What waits for it then comes first: turns that
            follow each other would evict it before.
    """

    num_bytes: int
    is_pinned: bool = False
    is_leaving: bool = False
    is_fresh: bool = False
    refs: int = 0
    slot: int = -1
    host: Copy = Copy.NONE
    device: Copy = Copy.NONE

    @property
    def is_idle(self) -> bool:
        """Whether its device copy is there and may be given up."""
        return self.device is Copy.HERE and not self.refs and (not self.is_pinned or self.is_leaving)
