"""The log of a prefix index: which blocks it holds, and what has changed since the log was last taken. Pure.

For routers in front of several engines: they learn which prefixes an engine has. The first group of layers stands for
the others.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar


@dataclasses.dataclass(frozen=True, slots=True)
class NamedBlock:
    """A full block of the prefix index.

    Attributes:
        name: its name (see `prefix`).
        parent: name of the block before it; `root` for the first.
        root: start of its chain of names, which stands for its tenant.
        tokens: its tokens.
    """

    name: bytes
    parent: bytes
    root: bytes
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheDiff:
    """What has changed. `is_whole`: there were no blocks before, and `added` are all there are."""

    is_whole: bool
    removed: tuple[bytes, ...]
    added: tuple[NamedBlock, ...]


class CacheLog:
    """The log of one index."""

    def __init__(self) -> None:
        self._live: dict[bytes, NamedBlock] = {}
        self._removed: dict[bytes, None] = {}  # a set with an order
        self._added: dict[bytes, NamedBlock] = {}
        self._is_whole = True

    def add(self, block: NamedBlock) -> None:
        """Records a block that got its name."""
        self._live[block.name] = self._added[block.name] = block

    def remove(self, name: bytes) -> None:
        """Records a block that lost its name. Names of other groups than the first are not in the log."""
        if self._live.pop(name, None) is not None and self._added.pop(name, None) is None:
            self._removed[name] = None

    @property
    def names(self) -> frozenset[bytes]:
        """The names of all blocks."""
        return frozenset(self._live)

    def start_again(self) -> None:
        """Makes the next difference a whole one."""
        self._is_whole = True

    def take(self) -> CacheDiff | None:
        """Returns what has changed since the last call, removals first; None if nothing has."""
        if not (self._is_whole or self._removed or self._added):
            return None
        added = parents_first(self._live) if self._is_whole else self._added.values()
        diff = CacheDiff(self._is_whole, () if self._is_whole else tuple(self._removed), tuple(added))
        self._removed, self._added, self._is_whole = {}, {}, False
        return diff


class InChain(Protocol):
    """A block with a name and the name of the block before it."""

    @property
    def name(self) -> bytes:
        """Its name."""

    @property
    def parent(self) -> bytes:
        """The name of the block before it."""


_Block = TypeVar("_Block", bound=InChain)


def parents_first(live: Mapping[bytes, _Block]) -> Iterator[_Block]:
    """Yields the blocks, by their names, each behind its parent if that is among them."""
    listed: set[bytes] = set()
    for block in live.values():
        chain: list[_Block] = []
        at: _Block | None = block
        while at is not None and at.name not in listed:
            listed.add(at.name)
            chain.append(at)
            at = live.get(at.parent)
        yield from reversed(chain)
