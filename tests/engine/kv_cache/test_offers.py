"""Offers and imports at any time and in any order: what is read is what was named, and no slot or block is lost."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.kv_cache.imports import PrefixImport
from sluice_server.engine.kv_cache.moves import MoveKind
from sluice_server.engine.kv_cache.offers import LEASE_S, Offers
from sluice_server.engine.kv_cache.prefix import root
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.table import BlockTable

SIZE = 4
ROOT = root(UNNAMED, b"a")
Content = tuple[int, ...]  # all tokens up to a block's end, and the group of layers


class Transfers(RuleBasedStateMachine):
    """Two caches: blocks of the first are offered, and the second fetches them."""

    @initialize(window=st.sampled_from([None, 3, 9]), num_slots=st.sampled_from([1, 3, 30]))
    def make(self, window: int | None, num_slots: int) -> None:
        windows = (None,) if window is None else (None, Window(window, 8))
        self.source = KVCache(24, SIZE, True, None, windows)
        self.target = KVCache(24, SIZE, True, None, windows)
        self.target.start_log()
        self.source.offers = Offers(num_slots)
        self.contents: tuple[dict[int, Content], dict[int, Content]] = ({}, {})
        self.shared: dict[int, tuple[bytes, Content]] = {}
        self.held: list[BlockTable] = []
        self.leased: dict[bytes, float] = {}
        self.now_s = 0.0

    @rule(num=st.integers(1, 18), word=st.integers(0, 2), at=st.sampled_from([0, 1]), keeps=st.booleans())
    def compute(self, num: int, word: int, at: int, keeps: bool) -> None:
        """A sequence at either cache, which checks what its prefix holds."""
        cache, content = (self.source, self.target)[at], self.contents[at]
        tokens, table = [word] * num, BlockTable(ROOT, groups=[[] for _ in cache.sizes.windows])
        found = cache.match(table, tokens)
        if not cache.capacity.can_take(found, num, spare=0):
            return
        cache.adopt(table, found, num)
        for group, own in enumerate(table.groups):
            for i, block in enumerate(own):
                if block != cache.pool.null:
                    assert content[block] == (*tokens[: (i + 1) * SIZE], group), "found something else"
        if not cache.grow(table, num):  # in one piece a window takes more than in chunks
            cache.release(table)
            return
        for group, own in enumerate(table.groups):
            for i in range(found.num, len(own)):
                content[own[i]] = (*tokens[: (i + 1) * SIZE], group)
        cache.commit(table, tokens, num)
        self.carry_out()
        if keeps and at == 0:
            self.held.append(table)
        else:
            cache.release(table)

    @precondition(lambda self: self.held)
    @rule(fails=st.booleans())
    def leave(self, fails: bool) -> None:
        table = self.held.pop()
        if fails:
            self.source.disown(table)
            named = table.names[: table.num_named]
            self.carry_out()
            assert all(self.source.index.find(name) is not None for name, _ in self.shared.values() if name in named)
        self.source.release(table)

    @rule(
        num=st.integers(1, 18),
        word=st.integers(0, 2),
        lost=st.sets(st.integers(0, 30), max_size=6),
        late=st.integers(0, 12),
    )
    def fetch(self, num: int, word: int, lost: set[int], late: int) -> None:
        """Blocks go over, of which some are lost and the last ones late."""
        prefix = PrefixImport(self.target, ROOT, [word] * num)
        offered = {name: at for at, name in self.names().items() if at not in lost}
        try:
            for name in prefix.wanted(offered)[:late]:
                block = prefix.take(name)
                if block is None:
                    break
                assert self.target.index.find(name) is None
                self.contents[1][block] = ()  # half written
                if self.now_s % 3 == 2 and len(lost) > 3:
                    break  # it never completes
                self.contents[1][block] = self.shared[offered[name]][1]
                prefix.complete(block)
        finally:
            prefix.end()

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.source.offers is not None
        self.source.offers.pass_time(self.now_s)

    @rule(at=st.sets(st.integers(0, 30), max_size=5))
    def release(self, at: set[int]) -> None:
        assert self.source.offers is not None
        names = [name for slot, name in self.names().items() if slot in at]
        self.source.offers.release(names)
        for name in names:
            self.leased.pop(name, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "source"):
            self.source.check(self.held)
            self.target.check([])

    def names(self) -> dict[int, bytes]:
        return {slot: name for slot, (name, _) in self.shared.items()}

    def carry_out(self) -> None:
        for move in self.source.take_moves():
            before = self.shared.pop(move.target, None)
            if move.kind is MoveKind.OFFER:
                if before is not None:
                    assert self.leased.get(before[0], 0.0) <= self.now_s, "overwritten within its lease"
                self.shared[move.target] = move.name, self.contents[0][move.source]
                self.leased[move.name] = self.now_s + LEASE_S
        self.target.take_moves()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def named_before_complete(self: PrefixImport, name: bytes) -> int | None:
    block = self._cache.take_block() if self._cache.pool.num_free else None
    if block is not None:
        self._quarantine[block] = name
        self._cache.name_block(name, block, None)
    return block


def names_another(self: PrefixImport, block: int) -> None:
    del self._quarantine[block]
    self._cache.name_block(self._names[-1], block, self._logged(self._names[-1]))
    self._kept.append(block)


def ends_early(self: PrefixImport) -> None:
    self._quarantine, self._kept = {}, []


def overwrites_leases(self: Offers) -> int | None:
    if self._free:
        return self._free.pop()
    name, slot = self._slot_of.popitem(last=False)
    del self._until[name]
    return slot


def keeps_offers_of_failures(self: Offers, name: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("owner", "method", "bug"),
    [
        (PrefixImport, "take", named_before_complete),
        pytest.param(PrefixImport, "complete", names_another, marks=pytest.mark.long),  # thousands of examples: 16 s
        (PrefixImport, "end", ends_early),
        (Offers, "_take_slot", overwrites_leases),
        (Offers, "withdraw", keeps_offers_of_failures),
    ],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, bug: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, method, bug)
    until_found = settings(  # one in a few hundred examples shows a bug
        max_examples=5_000,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    with pytest.raises(Exception):  # noqa: B017 # whichever check sees it first
        run_state_machine_as_test(Transfers, settings=until_found)
