"""Grammar matchers by slot, and the token masks that they allow next.

A matcher is advanced from the tokens whenever a sequence takes a slot, so that it is the same after preemption, replay
and forks. Masks are filled by separate threads: behind a sampled token while the next step is planned, and what is
left, as behind drafts, while the model computes. An error of one matcher is reported for its row only. Logits are not
used.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import Placement
from sluice_server.engine.sampling.grammars import Grammar, Grammars
from sluice_server.engine.sampling.rows import Bits, GrammarMasks, Ints, Words


@dataclasses.dataclass(slots=True)
class _Follower:
    """A matcher and how far it has followed the output.

    Attributes:
        grammar: None if it failed to compile; then `matcher` is None too.
        num_tokens: tokens of prompt and output up to which it has followed.
        mask: what may follow them, int32 [words], if it was filled early.
    """

    grammar: Grammar | None
    matcher: LLMatcher | None
    num_tokens: int
    mask: "Words | None" = None

    @property
    def is_lost(self) -> bool:
        """Whether the output left the grammar, or following it exceeded a limit."""
        return self.matcher is None or self.matcher.is_error()

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output."""
        if self.matcher is not None:
            self.matcher.consume_tokens(list(tokens))
        self.num_tokens += len(tokens)
        self.mask = None

    def go_back(self, num: int) -> None:
        """Takes back the last tokens of the output."""
        if self.matcher is not None:
            self.matcher.rollback(num)
        self.num_tokens -= num
        self.mask = None

    def count_mask(self, num: int = 1) -> None:
        """Counts masks that are computed of the grammar."""
        if self.grammar is not None:
            self.grammar.num_masks += num


@dataclasses.dataclass(slots=True)
class _Rows:
    """The rows of a step that follow grammars.

    Attributes:
        rows: those whose masks are filled.
        lost: those whose grammar cannot be followed.
        firsts: followers, with the index in `rows` of the first row of each.
        drafts: by that index, the longest draft.
    """

    rows: list[int] = dataclasses.field(default_factory=list)
    lost: list[int] = dataclasses.field(default_factory=list)
    firsts: list[tuple[_Follower, int]] = dataclasses.field(default_factory=list)
    drafts: dict[int, Sequence[int]] = dataclasses.field(default_factory=dict)

    @property
    def to_fill(self) -> bool:
        """Whether some mask was not filled early."""
        return any(at in self.drafts or follower.mask is None for follower, at in self.firsts)


class SlotMatchers:
    """Matchers by slot, for the slots whose output is constrained."""

    def __init__(self, grammars: Grammars, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos_ids = frozenset(eos_ids)
        self._width = -(-vocab_size // 32)
        self._no_end: Words = np.full(self._width, -1, dtype=np.int32)  # every bit but those of `eos_ids`
        for token in eos_ids:
            self._no_end[token // 32] ^= np.uint32(1 << token % 32).view(np.int32)
        self._followers: dict[int, _Follower] = {}
        self._threads = LLExecutor()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._early: Future[None] | None = None  # masks that are filled before it is known whether they are needed

    def listens(self, slot: int) -> bool:
        """Returns whether the slot's tokens must be passed to `note`."""
        return slot in self._followers

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        self._settle()
        self._followers.pop(placement.slot, None)
        if not placement.params.grammar:
            return
        try:
            grammar = self._grammars.compile(placement.params.grammar)
        except ServiceError:  # it compiled when the request arrived; reported when the row samples
            grammar = None
        follower = _Follower(grammar, grammar.matcher() if grammar is not None else None, placement.num_prompt)
        follower.append(placement.tokens[placement.num_prompt :])
        self._followers[placement.slot] = follower

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`.

        `computed` are the tokens right before it; some of them may be new. A position before the last one tells that a
        step is computed again.
        """
        self._settle()
        follower = self._followers.get(slot)
        if follower is None:
            return
        if follower.num_tokens < position:
            follower.append(computed[follower.num_tokens - position :])
        elif follower.num_tokens > position:
            follower.go_back(follower.num_tokens - position)

    def expect(self, sampled: Sequence[tuple[int, int, int]]) -> None:
        """Begins to fill the masks behind tokens that were just sampled: of each its slot, its position and its id.

        Most slots sample there next, and while a step is planned a core is free. Where one does not, nothing is lost:
        its sequence has ended, or the step is computed again, of which `note` tells.
        """
        self._settle()
        due: list[tuple[_Follower, int]] = []
        for slot, position, token in sampled:
            follower = self._followers.get(slot)
            if follower is not None and follower.num_tokens == position and token not in self._eos_ids:
                due.append((follower, token))
        if due:
            is_begun = threading.Event()
            self._early = self._aside.submit(self._fill_early, due, is_begun)
            is_begun.wait()  # else it had the interpreter's lock only when the next forward pass begins

    def _fill_early(self, due: Sequence[tuple[_Follower, int]], is_begun: threading.Event) -> None:
        try:
            for follower, token in due:
                follower.append((token,))
            alive = [follower for follower, _ in due if not follower.is_lost]
            bits: Bits = np.full((len(alive), self._width), -1, dtype=np.int32)
            entries = [(one.matcher, at) for at, one in enumerate(alive) if one.matcher is not None]
        finally:
            is_begun.set()
        if entries:  # each call needs at least one
            fill_next_token_bitmask_par(self._threads, entries, bits)
        for one, mask in zip(alive, bits, strict=True):
            one.mask = mask
            one.count_mask()

    def _settle(self) -> None:
        """Waits for the masks that are filled early, so that slots may change."""
        early, self._early = self._early, None
        if early is not None:
            early.result()

    def start(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> "Future[GrammarMasks | None]":
        """Begins to fill the masks of the rows of these slots, in their order, as far as they are not filled.

        A slot may have several consecutive rows. `ahead`: by row, the tokens drafted before it, one more for each row.
        Behind a draft that the grammar forbids the mask allows all tokens, as such a row is never used. No slot may
        change until the result is there.
        """
        self._settle()
        rows = self._rows(slots, ahead) if self._followers else _Rows()
        if rows.to_fill:
            return self._aside.submit(self._masks, rows)
        filled: Future[GrammarMasks | None] = Future()
        filled.set_result(self._masks(rows))
        return filled

    def _rows(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> "_Rows":
        found = _Rows()
        for row, slot in enumerate(slots):
            follower = self._followers.get(slot)
            if follower is None:
                continue
            if follower.is_lost:
                found.lost.append(row)
                continue
            if row not in ahead:
                found.firsts.append((follower, len(found.rows)))
            else:
                found.drafts[found.firsts[-1][1]] = ahead[row]
            found.rows.append(row)
        return found

    def _masks(self, rows: "_Rows") -> GrammarMasks | None:
        bits: Bits = np.full((len(rows.rows), self._width), -1, dtype=np.int32)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for follower, at in rows.firsts:
            assert follower.matcher is not None
            if at in rows.drafts:
                drafted.append((follower.matcher, at, list(rows.drafts[at])))
                follower.count_mask(1 + len(rows.drafts[at]))
            elif follower.mask is not None:
                bits[at] = follower.mask
            else:
                plain.append((follower.matcher, at))
                follower.count_mask()
        if plain:  # each call needs at least one entry
            fill_next_token_bitmask_par(self._threads, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._threads, drafted, bits)
        lost = rows.lost + [rows.rows[at] for follower, at in rows.firsts if follower.is_lost]
        if not rows.rows and not lost:
            return None
        at_rows: Ints = np.array(rows.rows, dtype=np.int64)
        return GrammarMasks(at_rows, bits, frozenset(lost), self._no_end)
