"""Tells gateways what the engine's prefix cache holds, from its log."""

from collections.abc import Callable

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.log import NamedBlock
from sluice_server.services.messages.details import CachedBlock
from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import CacheChanges
from sluice_server.services.messages.work import pack_ids

MAX_BLOCKS = 256  # of one message


class CacheReports:
    """The reports of one engine's cache. Without a log it has none to send."""

    def __init__(self, engine: Engine, engine_id: str, epoch: int, emit: Callable[[Message], None]) -> None:
        self._log = engine.scheduler.cache.index.log
        self._identity = engine.identity
        self._engine_id = engine_id
        self._epoch = epoch
        self._emit = emit
        self._number = 0
        self._tenants: dict[bytes, str] = {}  # by root of the chain of names

    @property
    def identity(self) -> bytes:
        """The identity of which names are made, encoded; b"" without a log."""
        return b"" if self._log is None else self._identity.encoded()

    def know(self, root: bytes, tenant: str) -> None:
        """Notes whose the blocks are that are named from `root` on."""
        if self._log is not None:
            self._tenants[root] = tenant

    def start_again(self) -> None:
        """Makes the next report one of all blocks."""
        if self._log is not None:
            self._log.start_again()

    def report(self) -> None:
        """Sends what has changed since the last report."""
        diff = self._log.take() if self._log is not None else None
        if diff is None:
            return
        added, removed, is_whole = diff.added, diff.removed, diff.is_whole
        while True:
            self._send(is_whole, removed[:MAX_BLOCKS], () if removed[MAX_BLOCKS:] else added[:MAX_BLOCKS])
            added = added if removed[MAX_BLOCKS:] else added[MAX_BLOCKS:]
            removed, is_whole = removed[MAX_BLOCKS:], False
            if not (added or removed):
                return

    def _send(self, is_whole: bool, removed: tuple[bytes, ...], added: tuple[NamedBlock, ...]) -> None:
        blocks = tuple(self._cached(block) for block in added)
        self._emit(CacheChanges(self._engine_id, self._epoch, self._number, is_whole, removed, blocks))
        self._number += 1

    def _cached(self, block: NamedBlock) -> CachedBlock:
        parent = b"" if block.parent == block.root else block.parent
        return CachedBlock(block.name, parent, self._tenants[block.root], pack_ids(block.tokens))
