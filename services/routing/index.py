"""Knows which engines hold which blocks: what they reported, and what they are about to compute.

Blocks are known by their names alone (`engine.kv_cache.prefix`): 32 bytes made of tenant, adapter, weights and tokens.
Reports of an engine are numbered: after a gap nothing of it is believed until it reports all.
"""

from collections import deque
from collections.abc import Iterable, Sequence

EXPECTED_S = 60.0  # how long a block counts as held that was never reported: its request may have been cancelled
STRIDE = 16  # blocks of a long prompt, of which the last stands for all: caches let go of the ends of prefixes first


class CacheIndex:
    """The blocks of several engines: for each name, one bit an engine, so that a prompt is matched with all at once."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._bit_of = {name: 1 << at for at, name in enumerate(engines)}
        self._engine_of = {bit: name for name, bit in self._bit_of.items()}
        self._held: dict[bytes, int] = {}  # reported
        self._sets: dict[int, int] = {}  # one object for equal values of `_held`: few, which no look waits for
        self._expected: dict[bytes, int] = {}  # routed there, and not reported yet
        self._order: deque[tuple[float, int, list[bytes]]] = deque()  # when expectations end, the oldest first
        self._next: dict[str, tuple[int, int]] = {}  # epoch and number of an engine's next report

    def change(self, engines: Iterable[str]) -> None:
        """Makes these the engines: those that left are forgotten, and nothing is known of those that joined."""
        names = tuple(engines)
        for name in self._bit_of.keys() - set(names):
            self.forget(name)
            del self._bit_of[name]
        for name in names:
            if name not in self._bit_of:
                taken = set(self._bit_of.values())
                self._bit_of[name] = next(1 << at for at in range(len(taken) + 1) if 1 << at not in taken)
        self._engine_of = {bit: name for name, bit in self._bit_of.items()}

    def report(
        self,
        engine: str,
        epoch: int,
        number: int,
        removed: Iterable[bytes],
        added: Iterable[bytes],
        *,
        is_whole: bool = False,
    ) -> bool:
        """Takes a report; returns False after a gap: then the engine must be asked for all of its blocks. Ignores
        reports that were taken before, and engines that are not of this index."""
        bit = self._bit_of.get(engine, 0)
        if not bit:
            return True
        wanted = self._next.get(engine)
        if wanted is not None and (epoch, number) < wanted:
            return True  # it came before, from another gateway
        if not is_whole and (epoch, number) != wanted:
            self.forget(engine)
            return False
        if is_whole:
            self._drop(self._held, bit)
        self._next[engine] = (epoch, number + 1)
        for name in removed:
            self._clear(self._held, name, bit)
        held, expected, sets = self._held, self._expected, self._sets
        for name in added:
            bits = held.get(name, 0) | bit
            held[name] = sets.setdefault(bits, bits)
            if name in expected:
                self._clear(expected, name, bit)
        return True

    def knows(self, engine: str) -> bool:
        """Whether what this engine holds is known."""
        return engine in self._next

    def forget(self, engine: str) -> None:
        """Forgets all that an engine holds, or will: it has ended, or its reports have a gap."""
        bit = self._bit_of[engine]
        self._next.pop(engine, None)
        self._drop(self._held, bit)
        self._drop(self._expected, bit)
        self._order = deque(one for one in self._order if one[1] != bit)

    def expect(self, engine: str, names: Sequence[bytes], now_s: float, first: int = 0) -> None:
        """Counts the blocks of a prompt as held by the engine that it was sent to: those from `first` on that are
        looked for, and are not held yet. Each behind the last whole `STRIDE` is: there the next turn of a conversation
        goes on."""
        bit, held, expected = self._bit_of[engine], self._held, self._expected
        stride = (max(first, STRIDE) // STRIDE + 1) * STRIDE - 1
        end = max(first, STRIDE, len(names) // STRIDE * STRIDE)
        new = [*names[first:STRIDE], *names[stride::STRIDE], *names[end:]]
        if not first:  # else none is held, as the first of them is not
            new = [name for name in new if not held.get(name, 0) & bit]
        if expected.keys().isdisjoint(new):  # as a rule
            expected.update(dict.fromkeys(new, bit))
        else:
            new = [name for name in new if not expected.get(name, 0) & bit]
            for name in new:
                expected[name] = expected.get(name, 0) | bit
        if new:
            self._order.append((now_s + EXPECTED_S, bit, new))
        while self._order and self._order[0][0] <= now_s:
            _, bit, names = self._order.popleft()
            for name in names:
                if name in expected:  # few are: the others were reported
                    self._clear(expected, name, bit)

    def matched(self, names: Sequence[bytes], engines: Sequence[str]) -> dict[str, int]:
        """Returns for each of these engines how many leading blocks of a prompt it holds. Behind the first `STRIDE` an
        engine that holds a block is taken to hold those before it, so that few are looked for."""
        able, bit_of = 0, self._bit_of
        for engine in engines:
            able |= bit_of[engine]
        found: dict[int, int] = {}
        end = min(STRIDE, len(names))
        able = self._match_each(names, end, able, found)
        if able:
            self._match_behind(names, end, able, found)
        matched, engine_of = dict.fromkeys(engines, 0), self._engine_of
        for num, bits in found.items():
            while bits and num:
                lowest = bits & -bits
                matched[engine_of[lowest]] = num
                bits ^= lowest
        return matched

    def _match_each(self, names: Sequence[bytes], end: int, able: int, found: dict[int, int]) -> int:
        """Notes which of the blocks before `end` is the first that each of some engines lacks; returns those that lack
        none."""
        held, expected = self._held.get, self._expected.get
        for num in range(end):
            name = names[num]
            still = able & (held(name, 0) | expected(name, 0))
            if still != able:
                found[num] = able & ~still
                able = still
                if not able:
                    break
        return able

    def _match_behind(self, names: Sequence[bytes], first: int, able: int, found: dict[int, int]) -> None:
        """Notes the same of the blocks from `first` on, by halves: at ends of strides as long as there is one between,
        and at that of the first before, as most engines have nothing behind what all prompts begin with."""
        held, expected = self._held.get, self._expected.get
        open_ = [(first, len(names), able)]  # with the least and most blocks that they hold
        while open_:
            least, most, bits = open_.pop()
            if least == most:
                found[least] = found.get(least, 0) | bits
                continue
            mid = first if least == first else (least + most) // 2
            at = mid // STRIDE * STRIDE + STRIDE - 1
            at -= STRIDE if at >= most else 0
            at = mid if at < least else at
            name = names[at]
            still = bits & (held(name, 0) | expected(name, 0))
            if still:
                open_.append((at + 1, most, still))
            if still != bits:
                open_.append((least, at, bits & ~still))

    @property
    def num_expected(self) -> int:
        """The number of blocks that are expected of any engine."""
        return len(self._expected)

    @staticmethod
    def _clear(blocks: dict[bytes, int], name: bytes, bit: int) -> None:
        left = blocks.get(name, 0) & ~bit
        if left:
            blocks[name] = left
        else:
            blocks.pop(name, None)

    @staticmethod
    def _drop(blocks: dict[bytes, int], bit: int) -> None:
        for name in [name for name, bits in blocks.items() if bits & bit]:
            CacheIndex._clear(blocks, name, bit)
