"""Memory that an engine writes copies of cache blocks to, and that other processes of its host read.

The memory is an anonymous file: whoever has its descriptor can read it, also after its owner has ended, and nobody but
its owner can write to it or change its size.

    header │ entry of each slot: generation, checksum, name │ block of each slot

A generation is odd while its slot is written, and even afterwards. Readers copy a block first, and then look whether
generation and checksum still fit: so what is overwritten meanwhile, or what its owner left half written, is not taken.
"""

import fcntl
import hashlib
import mmap
import os
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_HEADER = np.dtype([("magic", "S8"), ("version", "<u4"), ("slots", "<u8"), ("block_bytes", "<u8"), ("layout", "V32")])
_ENTRY = np.dtype([("generation", "<u8"), ("key", "<u8"), ("checksum", "<u4"), ("name", "V36")])
_MAGIC, _VERSION = b"sluicekv", 1
_NAME_BYTES = 36
_KEY_BYTES = 8  # of a name, by which entries are found
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: no further mapping can be written to
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE | fcntl.F_SEAL_SEAL
_PAGE = mmap.PAGESIZE


class SharedSlots:
    """The slots of one engine, for writing.

    Attributes:
        file: the descriptor, which other processes get.
    """

    def __init__(self, num_slots: int, block_bytes: int, layout: bytes) -> None:
        """`layout`: what must be equal for a block's bytes to mean the same. Raises OSError without the memory."""
        self.num_slots = num_slots
        self.file = os.memfd_create("sluice-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, _start_of(num_slots) + num_slots * block_bytes)
            self._memory = mmap.mmap(self.file, 0)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self.file)
            raise
        self._block_bytes = block_bytes
        header = np.zeros(1, _HEADER)
        header[0] = (_MAGIC, _VERSION, num_slots, block_bytes, hashlib.sha256(layout).digest())
        self._memory[: _HEADER.itemsize] = header.tobytes()
        self._entries = np.frombuffer(self._memory, _ENTRY, num_slots, _PAGE)

    def write(self, slot: int, name: bytes, data: bytes) -> None:
        """Fills a slot with the block of that name."""
        assert len(data) == self._block_bytes, "a block of another size"
        entry = self._entries[slot : slot + 1]
        generation = self._open(slot)
        at = _start_of(self.num_slots) + slot * self._block_bytes
        self._memory[at : at + self._block_bytes] = data
        entry["key"], entry["checksum"] = int.from_bytes(name[:_KEY_BYTES], "little"), zlib.crc32(data)
        entry["name"] = _padded(name)
        entry["generation"] = generation + 1

    def read(self, slot: int) -> bytes:
        """Returns the block of a slot."""
        at = _start_of(self.num_slots) + slot * self._block_bytes
        return self._memory[at : at + self._block_bytes]

    def clear(self, slot: int) -> None:
        """Clears a slot: nothing is found in it, and its bytes are gone."""
        entry = self._entries[slot : slot + 1]
        generation = self._open(slot)
        entry["key"], entry["name"] = 0, _padded(b"")
        at = _start_of(self.num_slots) + slot * self._block_bytes
        self._memory[at : at + self._block_bytes] = bytes(self._block_bytes)
        entry["generation"] = generation + 1

    def close(self) -> None:
        """Gives the memory up. Processes that have its descriptor still read it."""
        os.close(self.file)

    def _open(self, slot: int) -> int:
        """Marks a slot as being written; returns the odd generation."""
        generation = int(self._entries["generation"][slot]) + 1
        self._entries["generation"][slot] = generation
        return generation


class FoundSlot(NamedTuple):
    """A slot in which a name was found."""

    slot: int
    name: bytes


class ReadSlots:
    """The slots of another engine, for reading, whether it still runs or not."""

    def __init__(self, file: int, block_bytes: int, layout: bytes) -> None:
        """Maps the memory; the descriptor may be closed afterwards. Raises ValueError for memory of another layout, and
        for memory that its owner could still shrink."""
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("its memory is not sealed")
        size = os.fstat(file).st_size
        if size < _PAGE:
            raise ValueError(f"its memory has {size} bytes")
        self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        header = np.frombuffer(self._memory, _HEADER, 1)[0]
        self._num, self._block_bytes = int(header["slots"]), block_bytes
        if (bytes(header["magic"]), int(header["version"])) != (_MAGIC, _VERSION):
            raise ValueError("its memory is of another version")
        if (int(header["block_bytes"]), header["layout"].tobytes()) != (block_bytes, hashlib.sha256(layout).digest()):
            raise ValueError("its blocks are of another model, format or layout")
        if size < _start_of(self._num) + self._num * block_bytes:
            raise ValueError(f"its memory has {size} bytes, too few for {self._num} slots")
        self._entries = np.frombuffer(self._memory, _ENTRY, self._num, _PAGE)

    def find(self, names: Iterable[bytes]) -> dict[bytes, FoundSlot]:
        """Returns where those of the names are that are offered."""
        wanted = {name: int.from_bytes(name[:_KEY_BYTES], "little") for name in names}
        slots = np.flatnonzero(np.isin(self._entries["key"], np.array(list(wanted.values()), dtype=np.uint64)))
        slot_of = {self._entries["name"][slot].tobytes(): int(slot) for slot in slots}
        padded = ((name, slot_of.get(_padded(name))) for name in wanted)
        return {name: FoundSlot(slot, name) for name, slot in padded if slot is not None}

    def generations(self) -> NDArray[np.uint64]:
        """Returns how often each slot was written or cleared, twice over; odd while it is."""
        return self._entries["generation"].astype(np.uint64)

    def written_since(self, seen: NDArray[np.uint64], most: int) -> list[tuple[FoundSlot, int]]:
        """Returns up to `most` slots whose generations differ from those in `seen`, and their generations; not those
        that are being written or are empty."""
        now, keys = self.generations(), self._entries["key"]
        changed = np.flatnonzero((now != seen) & (now % 2 == 0) & (keys != 0))[:most]
        names = [(int(slot), self._entries["name"][slot].tobytes()) for slot in changed]
        return [(FoundSlot(slot, _unpadded(name)), int(now[slot])) for slot, name in names]

    @property
    def region(self) -> tuple[int, int]:
        """The address and the size of this mapping, which cannot be written to."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data), len(self._memory)

    def place_of(self, place: FoundSlot) -> tuple[int, int]:
        """Returns the address of the block in a place, and its checksum, which tells a reader whether the slot was
        written to meanwhile."""
        address, _ = self.region
        at = _start_of(self._num) + place.slot * self._block_bytes
        return address + at, int(self._entries["checksum"][place.slot])

    def read(self, place: FoundSlot) -> bytes | None:
        """Returns the block in a place; None if it is not there any more."""
        entry = self._entries[place.slot : place.slot + 1]
        before = int(entry["generation"][0])
        at = _start_of(self._num) + place.slot * self._block_bytes
        data = self._memory[at : at + self._block_bytes]
        is_whole = before % 2 == 0 and entry["name"][0].tobytes() == _padded(place.name)
        is_whole = is_whole and int(entry["checksum"][0]) == zlib.crc32(data)
        return data if is_whole and int(entry["generation"][0]) == before else None


def _start_of(num_slots: int) -> int:
    """Returns where the first block begins."""
    return _PAGE + -(-num_slots * _ENTRY.itemsize // _PAGE) * _PAGE


def _unpadded(name: bytes) -> bytes:
    """Returns a name of 32 bytes, or of 33 where a group of layers other than the first is behind it."""
    return name[:33] if name[32] else name[:32]


def _padded(name: bytes) -> bytes:
    return name.ljust(_NAME_BYTES, b"\0")
