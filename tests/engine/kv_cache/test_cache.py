"""Pool, prefix index and block tables: unit cases, and a state machine that checks invariant I3 after every rule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.kv_cache.moves import MoveKind
from sluice_server.engine.kv_cache.pool import BlockPool, EvictionClass
from sluice_server.engine.kv_cache.prefix import name_block, root
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers
from tests.engine.kv_cache.replica import Replica

SIZE = 4


def test_unused_blocks_are_taken_in_order_and_counted() -> None:
    pool = BlockPool(3)
    assert [(pool.allocate(), pool.reached) for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]


def test_nameless_blocks_are_taken_again_before_unused_ones() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    for block in reversed(blocks):
        pool.release(block, EvictionClass.NOT)
    pool.check()
    assert [pool.allocate() for _ in range(3)] == blocks and pool.reached == 3
    assert pool.allocate() == 3
    for keep in (EvictionClass.NORMAL, EvictionClass.NOT):
        pool.release(blocks[0], keep)
        pool.demote(blocks[0])
        pool.check()
        assert pool.allocate() == blocks[0]


def test_blocks_behind_a_shared_prefix_are_found_by_bisection() -> None:
    cache = KVCache(20, SIZE, True)
    first, second = BlockTable(root(UNNAMED)), BlockTable(root(UNNAMED))
    tokens = list(range(14))
    assert cache.grow(first, 14) and cache.capacity.num_behind_shared(first) == 4
    cache.commit(first, tokens, 14)
    cache.adopt(second, cache.match(second, [*tokens[:9], 99]), 10)
    assert cache.grow(second, 18)
    for table, num in ((first, 2), (second, 3), (BlockTable(root(UNNAMED)), 0)):
        assert cache.capacity.num_behind_shared(table) == cache.capacity.num_own(table) == num


def test_least_recently_released_block_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.share(blocks[0])
    assert [pool.allocate(), pool.allocate()] == [blocks[1], blocks[2]]
    pool.check()


def test_blocks_worth_keeping_go_last() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(5)]
    for block, keep in zip(
        blocks,
        (EvictionClass.LONG, EvictionClass.NORMAL, EvictionClass.NOT, EvictionClass.NORMAL, EvictionClass.NOT),
        strict=True,
    ):
        pool.release(block, keep)
        pool.check()
    assert [pool.allocate() for _ in range(5)] == [blocks[4], blocks[2], blocks[1], blocks[3], blocks[0]]


def test_double_release_is_our_own_fault() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate())
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(0)


def test_names_are_framed() -> None:
    assert root(UNNAMED, b"a", b"bc") != root(UNNAMED, b"ab", b"c")
    assert root(UNNAMED) != root(UNNAMED, b"")
    assert name_block(root(UNNAMED, b"x"), [1, 2]) != name_block(root(UNNAMED, b"y"), [1, 2])


def test_a_fork_names_its_blocks_by_its_own_tokens() -> None:
    """Names of a table that was preempted reach beyond what it has computed again when it is forked."""
    cache = KVCache(3, SIZE, prefix_caching=True)
    parent_tokens, child_tokens = list(range(9)), [*range(4), *range(20, 25)]
    parent = BlockTable(root(UNNAMED, b"t"))
    assert cache.grow(parent, 8)
    cache.commit(parent, parent_tokens, 8)
    cache.release(parent)
    cache.adopt(parent, cache.match(parent, parent_tokens[:5]), 5)
    child = cache.fork(parent, SIZE)
    assert cache.grow(child, 9), "which overwrites the parent's second block"
    cache.commit(child, child_tokens, 8)
    assert cache.match(BlockTable(root(UNNAMED, b"t")), parent_tokens).num == 1, "the child's block holds other tokens"
    assert cache.match(BlockTable(root(UNNAMED, b"t")), child_tokens).num == 2


def test_a_prefix_is_shared_but_never_its_last_token() -> None:
    cache, tokens = KVCache(8, SIZE, prefix_caching=True), list(range(8))
    first = BlockTable(root(UNNAMED, b"t"))
    assert cache.grow(first, 8)
    cache.commit(first, tokens, 8)
    second = BlockTable(root(UNNAMED, b"t"))
    assert cache.match(second, tokens).groups == [first.blocks[:1]]  # all 8 are cached, but one must be computed
    assert cache.match(BlockTable(root(UNNAMED, b"t")), [*tokens, 9]).groups == [first.blocks[:2]]
    assert cache.match(BlockTable(root(UNNAMED, b"other tenant")), tokens).num == 0


def test_disowned_blocks_are_not_found() -> None:
    cache, tokens = KVCache(8, SIZE, prefix_caching=True), list(range(9))
    table = BlockTable(root(UNNAMED))
    cache.grow(table, 9)
    cache.commit(table, tokens, 9)
    cache.disown(table)
    assert cache.match(BlockTable(root(UNNAMED)), tokens).num == 0


def test_a_private_table_neither_finds_nor_leaves_anything() -> None:
    cache, tokens = KVCache(8, SIZE, prefix_caching=True), list(range(9))
    public, private = BlockTable(root(UNNAMED)), BlockTable(root(UNNAMED), is_private=True)
    for table in (private, public):
        assert cache.match(table, tokens).num == 0
        cache.grow(table, 9)
        cache.commit(table, tokens, 9)
    assert cache.match(private, tokens).num == 0
    assert cache.match(BlockTable(root(UNNAMED)), tokens).groups == [public.blocks[:2]]


def filled(cache: KVCache, tokens: list[int]) -> BlockTable:
    """A table that has computed all of its tokens."""
    table = BlockTable(root(UNNAMED))
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def test_an_evicted_block_is_saved_and_comes_back_without_costing_what_was_found() -> None:
    cache = KVCache(4, SIZE, prefix_caching=True, tiers=Tiers(4, 0))
    tokens = list(range(13))
    table = filled(cache, tokens)
    first, second, third, _ = table.blocks
    cache.release(table)
    other = BlockTable(root(UNNAMED, b"other"))
    assert cache.grow(other, 2 * SIZE)  # takes the unnamed fourth block and, of the others, the end of the prefix
    (save,) = cache.take_moves()
    assert (save.kind, save.source) == (MoveKind.SAVE, third)
    cache.release(other)
    # `first` and `second` are now the oldest of all, but must not be overwritten by what follows them.
    found = cache.match(BlockTable(root(UNNAMED)), tokens)
    (restore,) = cache.take_moves()
    assert found.groups == [[first, second, restore.target]] and restore.target not in (first, second)
    assert (restore.kind, restore.source) == (MoveKind.RESTORE, save.target)
    cache.check([])


def test_what_is_cheaper_to_compute_is_not_saved() -> None:
    cache = KVCache(3, SIZE, prefix_caching=True, tiers=Tiers(4, 0))
    cache.release(filled(cache, list(range(12))), is_worthless=True)
    assert cache.grow(BlockTable(root(UNNAMED)), 12)
    assert cache.take_moves() == []


def test_blocks_come_from_disk_while_others_go_on() -> None:
    cache, tokens = KVCache(2, SIZE, prefix_caching=True, tiers=Tiers(2, 4)), list(range(9))
    for start in (0, 100, 200):  # the first ones go to host memory, then to disk
        cache.release(filled(cache, [start + token for token in range(8)]))
    written = [move for move in cache.take_moves() if move.kind is MoveKind.WRITE]
    for move in written:
        cache.moved(move, is_good=True)
    table = BlockTable(root(UNNAMED))
    assert cache.match(table, tokens).num == 0
    assert cache.is_awaited(table, tokens) and cache.is_awaited(table, tokens)
    reads = [move for move in cache.take_moves() if move.kind is MoveKind.READ]
    assert [move.name for move in reads] == [move.name for move in reversed(written)]  # its end left first
    cache.moved(reads[0], is_good=True)
    assert cache.is_awaited(table, tokens)
    cache.moved(reads[1], is_good=False)  # damaged: it is not found, not used, and read no more
    assert not cache.is_awaited(table, tokens)
    assert cache.match(table, tokens).num == 1
    cache.check([])


def test_blocks_behind_the_window_are_given_back() -> None:
    cache = KVCache(8, SIZE, prefix_caching=True, windows=(Window(size=6, max_chunk=4),))
    table, tokens = BlockTable(root(UNNAMED)), list(range(40))
    for num in range(SIZE, 40, SIZE):
        assert cache.grow(table, num)
        cache.commit(table, tokens, num)
        cache.trim(table, num)
        cache.check([table])
        first_seen = max(0, num - 6 + 1)
        assert table.trimmed == [first_seen // SIZE]
        assert all(block == cache.pool.null for block in table.blocks[: table.trimmed[0]])
    assert cache.pool.num_held <= cache.sizes.most_blocks(40) < cache.sizes.blocks_for(40)
    found = cache.match(BlockTable(root(UNNAMED)), tokens[:9])
    later = BlockTable(root(UNNAMED))
    cache.adopt(later, found, 9)
    cache.check([table, later])


class CacheMachine(RuleBasedStateMachine):
    """A state machine: tables start with a matching prefix, grow, are committed and released in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(12, SIZE, prefix_caching=True)
        self.log = self.cache.start_log()
        self.replica = Replica()
        self.tables: list[tuple[BlockTable, list[int]]] = []

    @rule(whole=st.booleans())
    def follow(self, whole: bool) -> None:
        if whole:
            self.log.start_again()
        self.replica.follow(self.log.take())
        assert self.replica.names == self.log.names
        assert self.log.take() is None

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), tenant=st.sampled_from([b"a", b"b"]))
    def begin(self, tokens: list[int], tenant: bytes) -> None:
        table = BlockTable(root(UNNAMED, tenant))
        found = self.cache.match(table, tokens)
        if self.cache.capacity.can_take(found, len(tokens), spare=0):
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
