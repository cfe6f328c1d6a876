"""Pool, prefix index and block tables: unit cases, and a state machine that checks I3 after every rule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.cache import BlockTable, KVCache
from engine.cache.pool import BlockPool
from engine.cache.prefix import name_block, root

SIZE = 4


def test_least_recently_released_block_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.share(blocks[0])
    assert [pool.allocate(), pool.allocate()] == [blocks[1], blocks[2]]
    pool.check()


def test_double_release_is_our_own_fault() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate())
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(0)


def test_names_are_framed() -> None:
    assert root([b"a", b"bc"]) != root([b"ab", b"c"])
    assert root([]) != root([b""])
    assert name_block(root([b"x"]), [1, 2]) != name_block(root([b"y"]), [1, 2])


def test_a_prefix_is_shared_but_never_its_last_token() -> None:
    cache, tokens = KVCache(8, SIZE, prefix_caching=True), list(range(8))
    first = BlockTable(root([b"t"]))
    assert cache.grow(first, 8)
    cache.commit(first, tokens, 8)
    second = BlockTable(root([b"t"]))
    assert cache.match(second, tokens) == first.blocks[:1]  # all 8 are cached, but one must be computed
    assert cache.match(BlockTable(root([b"t"])), [*tokens, 9]) == first.blocks[:2]
    assert cache.match(BlockTable(root([b"other tenant"])), tokens) == []


def test_disowned_blocks_are_not_found() -> None:
    cache, tokens = KVCache(8, SIZE, prefix_caching=True), list(range(9))
    table = BlockTable(root([]))
    cache.grow(table, 9)
    cache.commit(table, tokens, 9)
    cache.disown(table)
    assert cache.match(BlockTable(root([])), tokens) == []


class CacheMachine(RuleBasedStateMachine):
    """Tables that begin with what matches, grow, are committed and released in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(12, SIZE, prefix_caching=True)
        self.tables: list[tuple[BlockTable, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), tenant=st.sampled_from([b"a", b"b"]))
    def begin(self, tokens: list[int], tenant: bytes) -> None:
        table = BlockTable(root([tenant]))
        found = self.cache.match(table, tokens)
        if self.cache.can_take(found, len(tokens), spare=0):
            self.cache.adopt(table, found, len(tokens))
            assert self.cache.grow(table, len(tokens))
            self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), computed=st.floats(0, 1))
    def commit(self, data: st.DataObject, computed: float) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        self.cache.commit(table, tokens, int(len(tokens) * computed))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), disown=st.booleans())
    def release(self, data: st.DataObject, disown: bool) -> None:
        entry = data.draw(st.sampled_from(self.tables))
        if disown:
            self.cache.disown(entry[0])
        self.cache.release(entry[0])
        self.tables.remove(entry)

    @invariant()
    def holds(self) -> None:
        self.cache.check([table for table, _ in self.tables])

    @invariant()
    def shared_blocks_are_full_and_equal(self) -> None:
        content: dict[int, tuple[bytes, list[int]]] = {}
        for table, tokens in self.tables:
            for i, block in enumerate(table.blocks):
                mine = (table.root, tokens[: (i + 1) * SIZE])
                if self.cache.pool.refs(block) > 1:
                    assert len(mine[1]) == (i + 1) * SIZE
                    assert content.setdefault(block, mine) == mine


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
