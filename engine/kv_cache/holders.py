"""Asserts that the references of all blocks are those of the tables that hold them; for tests and simulation."""

from collections.abc import Sequence

from sluice_server.engine.kv_cache.pool import BlockPool
from sluice_server.engine.kv_cache.prefix import PrefixIndex
from sluice_server.engine.kv_cache.table import BlockTable


def check_holders(pool: BlockPool, index: PrefixIndex, tables: Sequence[BlockTable]) -> None:
    """Asserts invariant I3: the given tables are all that hold blocks, and each reference has its holder."""
    holders = [0] * pool.size + [1]
    for table in tables:
        assert len({len(own) for own in table.groups}) == 1, "groups of different length"
        for own, trimmed in zip(table.groups, table.trimmed, strict=True):
            assert trimmed == own.count(pool.null), "a block is missing inside the window"
            for block in own:
                holders[block] += 1
    for block, count in enumerate(holders):
        found = 0 if pool.is_offline(block) else pool.refs(block)
        assert found == count, f"block {block}: {found} references, {count} holders"
        assert not (pool.is_offline(block) and index.has(block)), f"block {block} is offline and named"
