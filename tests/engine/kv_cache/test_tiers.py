"""The tiers under a cache that does anything at any time: a name finds the content that was stored under it."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.clearing import clear, wipe
from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.kv_cache.imports import PrefixImport
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.pool import EvictionClass
from sluice_server.engine.kv_cache.prefix import is_of, names_of, owner_of, tenant_root
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers

SIZE = 4
Content = tuple[bytes, tuple[int, ...]]  # root, and all tokens up to a block's end
NOTHING: Content = (b"", ())


class TierMachine(RuleBasedStateMachine):
    """A state machine: tables over tiers whose moves are executed on contents, so that a wrong move shows."""

    @initialize(
        window=st.sampled_from([None, 3, 9]), num_host=st.sampled_from([1, 2, 4]), num_disk=st.sampled_from([0, 12])
    )
    def make(self, window: int | None, num_host: int, num_disk: int) -> None:
        self.tiers = Tiers(num_host, num_disk)
        self.cache = KVCache(5, SIZE, True, self.tiers, (Window(window, 24) if window else None,))
        self.device = [NOTHING] * 6
        self.host = [NOTHING] * num_host
        self.disk: dict[bytes, Content] = {}
        self.under_way: deque[tuple[Move, Content]] = deque()
        self.seen: dict[bytes, Content] = {}  # all that was ever computed, by name
        self.store: dict[bytes, Content] = {}  # of the host: another process
        self.fetched: deque[tuple[Move, Content]] = deque()  # as the store had it when the read began
        self.tables: list[tuple[BlockTable, list[int]]] = []

    @rule(
        num=st.integers(1, 18),
        word=st.integers(0, 2),
        tenant=st.sampled_from(["a", "a", "a", "b"]),
        is_private=st.sampled_from([False, False, False, True]),
    )
    def begin(self, num: int, word: int, tenant: str, is_private: bool) -> None:
        tokens = [word] * num  # few prompts, which come again and again
        table = BlockTable(tenant_root(UNNAMED.encoded(), tenant), is_private)
        if self.cache.is_awaited(table, tokens):
            return
        while not self.cache.capacity.can_take(found := self.cache.match(table, tokens), len(tokens), spare=0):
            if not self.tables:
                return
            self.cache.release(self.tables.pop(0)[0])
        self.cache.adopt(table, found, len(tokens))
        self.carry_out()
        for i, block in enumerate(found.groups[0]):
            if table.blocks[i] != self.cache.pool.null:
                assert self.device[block] == (table.root, tuple(tokens[: (i + 1) * SIZE])), "found something else"
        assert self.cache.grow(table, len(tokens))
        self.compute(table, tokens, found.num)
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork_and_part(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        child, more = self.cache.fork(table, len(tokens)), [*tokens, 1]
        if not self.cache.grow(child, len(more)):
            self.cache.release(child)
            return
        self.compute(child, more, len(tokens) // SIZE)
        self.tables.append((child, more))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keep=st.sampled_from(EvictionClass), is_worthless=st.booleans(), disown=st.booleans())
    def release(self, data: st.DataObject, keep: EvictionClass, is_worthless: bool, disown: bool) -> None:
        entry = data.draw(st.sampled_from(self.tables))
        if disown:
            self.cache.disown(entry[0])
        self.cache.release(entry[0], keep, is_worthless=is_worthless)
        self.tables.remove(entry)

    @rule(num=st.integers(1, 9), is_good=st.sampled_from([True, True, False]))
    def disk_works(self, num: int, is_good: bool) -> None:
        for _ in range(min(num, len(self.under_way))):
            move, content = self.under_way.popleft()
            if move.kind is MoveKind.REMOVE:
                self.disk.pop(move.name, None)
                continue
            if move.kind is MoveKind.CLEAR:
                self.disk = {name: one for name, one in self.disk.items() if not is_of(name, move.name)}
                self.cache.moved(move, is_good=True)
                continue
            is_found = is_good and (move.kind is MoveKind.WRITE or move.name in self.disk)
            if move.kind is MoveKind.WRITE and is_found:
                self.disk[move.name] = content
            elif move.kind is MoveKind.READ:
                self.host[move.target] = self.disk[move.name] if is_found else NOTHING
            self.cache.moved(move, is_found)

    @rule(num=st.integers(1, 9), is_good=st.sampled_from([True, True, False]))
    def store_gives(self, num: int, is_good: bool) -> None:
        """Beside the disk: the two end in any order."""
        for _ in range(min(num, len(self.fetched))):
            move, content = self.fetched.popleft()
            is_found = is_good and content != NOTHING
            self.host[move.target] = content if is_found else NOTHING
            self.cache.moved(move, is_found)

    @rule(share=st.sampled_from([0, 1, 2]), heard=st.sampled_from([1, 2, 3]))
    def store_changes(self, share: int, heard: int) -> None:
        """It has copied what was offered, has let go of some, or is another one that has nothing; an engine believes
        that it has what was heard of, there or not."""
        names = sorted(self.seen)
        self.store = {name: self.seen[name] for name in names[:: max(1, share)]} if share else {}
        self.tiers.expect(names[::heard])

    @rule(
        tenant=st.sampled_from([None, None, None, None, "a", "b", ""]),
        limit=st.integers(1, 9),
        is_at_once=st.booleans(),
    )
    def clear_a_tenant(self, tenant: str | None, limit: int, is_at_once: bool) -> None:
        if tenant is None:
            return  # seldom, as little is left then
        owner = owner_of(tenant) if tenant else b""
        clear(self.cache, owner, [table for table, _ in self.tables if is_of(table.root, owner)])
        gone = {name for name in self.seen if is_of(name, owner)}
        self.store = {name: one for name, one in self.store.items() if name not in gone}
        self.seen = {name: one for name, one in self.seen.items() if name not in gone}
        assert not any(map(self.tiers.can_bring, gone))
        if is_at_once:
            while wipe(self.cache, limit):
                pass
            self.carry_out()
            self.disk_works(100, is_good=True)
            self.store_gives(100, is_good=True)
            self.carry_out()
            while wipe(self.cache, limit):
                pass
            self.carry_out()
            held = {block for table, _ in self.tables for own in table.groups for block in own}
            free = [content for block, content in enumerate(self.device) if block not in held]
            kept = [*free, *self.host, *self.disk.values()]
            assert not [one for one in kept if one != NOTHING and is_of(one[0], owner)], "bytes are left"

    @rule(limit=st.integers(1, 3))
    def wipe_some(self, limit: int) -> None:
        wipe(self.cache, limit)
        self.carry_out()

    @invariant()
    def holds(self) -> None:
        self.cache.check([table for table, _ in self.tables])

    def compute(self, table: BlockTable, tokens: list[int], first: int) -> None:
        """Writes the blocks from index `first` on, names the full ones, and frees those before the window."""
        self.carry_out()
        for i in range(first, len(table.blocks)):
            assert self.cache.pool.refs(table.blocks[i]) == 1, "a write meets a shared block"
            self.device[table.blocks[i]] = (table.root, tuple(tokens[: (i + 1) * SIZE]))
        self.cache.commit(table, tokens, len(tokens))
        for block in table.blocks:
            name = self.cache.index.name_of(block)
            if name is not None:
                self.seen[name] = self.device[block]
        self.cache.trim(table, len(tokens))

    def carry_out(self) -> None:
        """Executes the moves in order; the disk's ones end later."""
        moves = self.cache.take_moves()
        for at, move in enumerate(moves):
            if move.kind is MoveKind.COPY:
                self.device[move.target] = self.device[move.source]
            elif move.kind is MoveKind.SAVE:
                self.host[move.target] = self.device[move.source]
            elif move.kind is MoveKind.RESTORE:
                self.device[move.target] = self.host[move.source]
            elif move.kind is MoveKind.WIPE:
                is_filled = any((one.kind, one.target) == (MoveKind.RESTORE, move.target) for one in moves[at:])
                assert is_filled or not self.cache.index.has(move.target), "a block that others may read is wiped"
                self.device[move.target] = NOTHING
            elif move.kind is MoveKind.WIPE_SLOT:
                self.host[move.target] = NOTHING
            elif move.kind is MoveKind.FETCH:
                self.fetched.append((move, self.store.get(move.name, NOTHING)))
            else:
                self.under_way.append((move, self.host[move.source] if move.kind is MoveKind.WRITE else NOTHING))


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_what_is_worth_keeping_goes_to_disk_at_the_end() -> None:
    """The most recently used first, in host memory or on the device; what is on disk is not written again."""
    tiers = Tiers(num_host=2, num_disk=4, on_disk=(name(8), name(1), name(9)))
    tiers.save(name(1), 11)
    tiers.save(name(2), 12)
    assert tiers.keep([(name(3), 13), (name(2), 14), (name(4), 15)]) == [
        Move(MoveKind.REMOVE, name=name(8)),
        Move(MoveKind.REMOVE, name=name(9)),
        Move(MoveKind.KEEP, 15, name=name(4)),
        Move(MoveKind.WRITE, 1, name=name(2)),
        Move(MoveKind.KEEP, 13, name=name(3)),
    ]
    assert tiers.disk_names == (name(1), name(3), name(2), name(4))
    tiers.check()


def test_the_store_is_asked_before_the_disk_and_believed_until_it_fails() -> None:
    tiers = Tiers(num_host=2, num_disk=4, on_disk=(name(1),))
    assert tiers.read(name(2)) is None and not tiers.can_bring(name(1))
    tiers.expect([name(1), name(2)])
    assert tiers.can_bring(name(2))
    first, second = (Move(MoveKind.FETCH, target=at, name=name(at + 1)) for at in range(2))
    assert tiers.read(name(1)) == [first] and tiers.read(name(2)) == [second]
    assert tiers.is_reading(name(1)) and tiers.read(name(1)) is None
    tiers.ended(first, is_good=False)
    tiers.ended(second, is_good=True)
    assert tiers.touch(name(2)) and not tiers.touch(name(1))
    assert (tiers.stats.num_fetched, tiers.stats.num_missed) == (1, 1)
    assert tiers.read(name(1)) == [Move(MoveKind.READ, target=0, name=name(1))] and tiers.is_on_disk(name(1))
    tiers.check()


def test_what_is_cached_behind_a_block_of_the_host_is_found_with_it() -> None:
    tiers = Tiers(num_host=4, num_disk=0)
    cache = KVCache(5, SIZE, True, tiers)
    root = tenant_root(UNNAMED.encoded(), "a")
    tokens = list(range(4 * SIZE))
    names = names_of(root, tokens, SIZE)
    tiers.expect(names[:1])
    imported = PrefixImport(cache, root, tokens)
    assert imported.lacking() == names[:3]
    for one in imported.wanted(names):
        if one != names[0]:
            block = imported.take(one)
            assert block is not None
            imported.complete(block)
    imported.end()
    table = BlockTable(root)
    assert cache.is_awaited(table, tokens)
    (fetch,) = cache.take_moves()
    cache.moved(fetch, is_good=True)
    assert cache.match(table, tokens).num == 3 and not cache.is_awaited(table, tokens)
    assert [move.kind for move in cache.take_moves()] == [MoveKind.RESTORE]
    cache.check([])


def test_no_more_is_kept_than_the_disk_may_hold() -> None:
    tiers = Tiers(num_host=1, num_disk=2, on_disk=(name(8), name(9)))
    moves = tiers.keep([(name(number), number) for number in range(1, 5)])
    assert [(move.kind, move.name) for move in moves] == [
        (MoveKind.REMOVE, name(8)),
        (MoveKind.REMOVE, name(9)),
        (MoveKind.KEEP, name(4)),
        (MoveKind.KEEP, name(3)),
    ]
    assert Tiers(num_host=1, num_disk=0).keep([(name(1), 1)]) == []


TierMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)
TestTierMachine = TierMachine.TestCase
