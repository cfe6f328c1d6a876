"""The blocks of a store: the most recently used in memory that engines read, older ones on disk, by the same names.

What cannot be written, or read back whole, is not there: engines compute it. A list of what is on disk lies in shared
memory too, so that engines ask for nothing that the store does not have.
"""

import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sluice_server.engine.kv_cache.block_files import SUFFIX, UNFINISHED
from sluice_server.engine.kv_cache.prefix import NAME_BYTES, is_of
from sluice_server.engine.kv_cache.shared_slots import SharedSlots

logger = logging.getLogger(__name__)

CHECK_BYTES = 4  # of the checksum before a block on disk
MARK = b"1"  # the one byte of a slot of that list


class Names:
    """Slots of shared memory by name, least recently used first."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots.num_slots - 1, -1, -1))

    def __contains__(self, name: bytes) -> bool:
        return name in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def touch(self, name: bytes) -> None:
        """Marks a name as the most recently used."""
        self._slot_of.move_to_end(name)

    def write(self, name: bytes, data: bytes) -> None:
        """Fills a free slot."""
        slot = self._slot_of[name] = self._free.pop()
        self._slots.write(slot, name, data)

    def of(self, owner: bytes) -> list[bytes]:
        """Returns the names of an owner's blocks; all for b""."""
        return [name for name in self._slot_of if is_of(name, owner)]

    def oldest(self) -> bytes:
        """Returns the name that was used least recently."""
        return next(iter(self._slot_of))

    def read(self, name: bytes) -> bytes:
        """Returns what the slot of a name holds."""
        return self._slots.read(self._slot_of[name])

    def clear(self, name: bytes) -> None:
        """Clears the slot of a name."""
        slot = self._slot_of.pop(name)
        self._slots.clear(slot)
        self._free.append(slot)


class BlockPool:
    """The memory and the disk of a store.

    Attributes:
        memory: what engines read blocks in.
        listed: what engines read the names on disk in; None without a disk.
    """

    def __init__(self, memory: SharedSlots, listed: SharedSlots | None, folder: Path | None, layout: bytes) -> None:
        """`layout`: files of another one, left by an earlier process, are removed. Raises OSError for a folder that
        cannot be read."""
        self.memory, self.listed = memory, listed
        self.num_failed = 0  # blocks that the disk did not take, or did not give back
        self._kept = Names(memory)
        self._on_disk = None if listed is None else Names(listed)
        self._folder = folder
        self._check = zlib.crc32(layout)  # the start of every checksum
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._find()

    @property
    def num_in_memory(self) -> int:
        """Blocks in memory."""
        return len(self._kept)

    @property
    def num_on_disk(self) -> int:
        """Blocks on disk."""
        return 0 if self._on_disk is None else len(self._on_disk)

    def has(self, name: bytes) -> bool:
        """Whether a block is in memory; it counts as used then."""
        if name not in self._kept:
            return False
        self._kept.touch(name)
        return True

    def put(self, name: bytes, data: bytes) -> None:
        """Keeps a block; what was used least recently goes to disk."""
        if self.has(name):
            return
        if self._kept.is_full:
            oldest = self._kept.oldest()
            self._to_disk(oldest, self._kept.read(oldest))
            self._kept.clear(oldest)
        self._kept.write(name, data)

    def want(self, names: Sequence[bytes]) -> None:
        """Brings blocks from disk into memory, the first ones: later ones must not take the place of what is still to
        be read."""
        for name in names[: max(1, self.memory.num_slots // 2)]:
            if self._on_disk is None or name not in self._on_disk or self.has(name):
                continue
            self._on_disk.touch(name)
            data = self._read(name)
            if data is None:
                self._drop(name)
            else:
                self.put(name, data)

    def clear(self, owner: bytes) -> bool:
        """Removes an owner's blocks, or all for b"", from memory and disk; returns whether no file is left."""
        before = self.num_failed
        for name in self._kept.of(owner):
            self._kept.clear(name)
        if self._on_disk is not None and self._folder is not None:
            for name in self._on_disk.of(owner):
                self._drop(name)
        return self.num_failed == before

    def close(self) -> None:
        """Writes what is in memory to disk, the most recently used last, as far as there is room."""
        while self._on_disk is not None and len(self._kept):
            oldest = self._kept.oldest()
            self._to_disk(oldest, self._kept.read(oldest))
            self._kept.clear(oldest)

    def _to_disk(self, name: bytes, data: bytes) -> None:
        if self._on_disk is None or self._folder is None or name in self._on_disk:
            return
        if self._on_disk.is_full:
            self._drop(self._on_disk.oldest())
        path = self._path(name)
        part = path.with_suffix(UNFINISHED)
        try:
            part.unlink(missing_ok=True)
            with part.open("xb") as file:
                file.write(zlib.crc32(data, self._check).to_bytes(CHECK_BYTES, "little") + data)
            part.rename(path)
        except OSError as error:
            self._failed(f"cannot write to {self._folder}: {error.strerror}")
            return
        self._on_disk.write(name, MARK)

    def _read(self, name: bytes) -> bytes | None:
        """Returns a block on disk; None if it is not what was written."""
        try:
            text = self._path(name).read_bytes()
        except OSError as error:
            self._failed(f"cannot read from {self._folder}: {error.strerror}")
            return None
        data = text[CHECK_BYTES:]
        if text[:CHECK_BYTES] == zlib.crc32(data, self._check).to_bytes(CHECK_BYTES, "little"):
            return data
        self._failed(f"{self._path(name)} is not what was written")
        return None

    def _drop(self, name: bytes) -> None:
        assert self._on_disk is not None
        self._on_disk.clear(name)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._failed(f"cannot remove from {self._folder}: {error.strerror}")

    def _failed(self, why: str) -> None:
        self.num_failed += 1
        if self.num_failed == 1:  # a full disk would fill the log, too
            logger.warning("%s; such blocks are computed again", why)

    def _path(self, name: bytes) -> Path:
        assert self._folder is not None
        return self._folder / f"{name.hex()}{SUFFIX}"

    def _find(self) -> None:
        """Lists what an earlier process left, the newest if there is too much."""
        assert self._folder is not None and self._on_disk is not None
        for part in self._folder.glob(f"*{UNFINISHED}"):
            part.unlink(missing_ok=True)
        files = [path for path in self._folder.glob(f"*{SUFFIX}") if _is_name(path.stem)]
        for path in sorted(files, key=lambda path: path.stat().st_mtime):
            if self._on_disk.is_full:
                self._drop(self._on_disk.oldest())
            self._on_disk.write(bytes.fromhex(path.stem), MARK)


def _is_name(stem: str) -> bool:
    return len(stem) in (2 * NAME_BYTES, 2 * NAME_BYTES + 2) and all(digit in "0123456789abcdef" for digit in stem)


def folder_of(directory: Path, layout: bytes, block_bytes: int) -> Path:
    """Returns the folder of the blocks of one layout."""
    return directory / f"{zlib.crc32(layout):08x}-{block_bytes}-{os.geteuid()}"
