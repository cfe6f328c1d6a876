"""Gives this engine's offered blocks to engines of other hosts. Pure but for the memory that it reads."""

import zlib
from collections import deque
from collections.abc import Iterator

import msgspec

from sluice_server.engine.kv_cache.shared_slots import ReadSlots
from sluice_server.services.transfer.names import parted
from sluice_server.services.transfer.network_frames import (
    OTHER_LAYOUT,
    REQUESTS,
    Block,
    Find,
    Get,
    Offered,
    Placed,
    Release,
    Where,
)

ENCODE = msgspec.msgpack.Encoder().encode


class BlockOwner:
    """Answers what readers ask.

    Attributes:
        released: names whose leases readers have ended.
        num_malformed: messages that were no requests.
        agent: see `Placed`.
    """

    def __init__(self, memory: ReadSlots, layout: bytes) -> None:
        """`layout`: its digest."""
        self.released: deque[bytes] = deque()
        self.num_malformed = 0
        self.agent = b""  # the metadata by which others read this memory themselves
        self._memory = memory
        self._layout = layout

    @property
    def region(self) -> tuple[int, int]:
        """Address and size of the memory that it reads."""
        return self._memory.region

    def answers(self, data: bytes) -> Iterator[list[bytes]]:
        """Yields the frames of the answers to one message."""
        try:
            asked = REQUESTS.decode(data)
        except msgspec.MsgspecError:
            self.num_malformed += 1
            return
        names = parted(asked.names)
        match asked:
            case Release():
                self.released.extend(names)
            case Find() if asked.layout != self._layout:
                yield [ENCODE(Offered(asked.number, b"", OTHER_LAYOUT))]
            case Find():
                found = self._memory.find(names)
                yield [ENCODE(Offered(asked.number, bytes(name in found for name in names)))]
            case Where() if asked.layout == self._layout:
                found = self._memory.find(names) if self.agent else {}
                places = (self._memory.place_of(found[name]) if name in found else (0, 0) for name in names)
                yield [ENCODE(Placed(asked.number, self.agent, tuple(places)))]
            case Get() if asked.layout == self._layout:
                found = self._memory.find(names)
                for at, name in enumerate(names):
                    place = found.get(name)
                    block = None if place is None else self._memory.read(place)
                    if block is None:
                        yield [ENCODE(Block(asked.number, at, 0, is_gone=True)), b""]
                    else:
                        yield [ENCODE(Block(asked.number, at, zlib.crc32(block))), block]
