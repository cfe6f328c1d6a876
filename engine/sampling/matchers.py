"""Grammar matchers by slot, and the token masks that they allow next.

A matcher is advanced from the tokens whenever a sequence takes a slot, so that it is the same after preemption, replay
and forks. Masks are filled by separate threads while the model computes. An error of one matcher is reported for its
row only. Logits are not used.
"""

import dataclasses
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
    """

    grammar: Grammar | None
    matcher: LLMatcher | None
    num_tokens: int

    @property
    def is_lost(self) -> bool:
        """Whether the output left the grammar, or following it exceeded a limit."""
        return self.matcher is None or self.matcher.is_error()

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output."""
        if self.matcher is not None:
            self.matcher.consume_tokens(list(tokens))
        self.num_tokens += len(tokens)


class SlotMatchers:
    """Matchers by slot, for the slots whose output is constrained."""

    def __init__(self, grammars: Grammars, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._width = -(-vocab_size // 32)
        self._no_end: Words = np.full(self._width, -1, dtype=np.int32)  # every bit but those of `eos_ids`
        for token in eos_ids:
            self._no_end[token // 32] ^= np.uint32(1 << token % 32).view(np.int32)
        self._followers: dict[int, _Follower] = {}
        self._threads = LLExecutor()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def listens(self, slot: int) -> bool:
        """Returns whether the slot's tokens must be passed to `note`."""
        return slot in self._followers

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
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

        `computed` are the tokens right before it; some of them may be new.
        """
        follower = self._followers.get(slot)
        if follower is not None and follower.num_tokens < position:
            follower.append(computed[follower.num_tokens - position :])

    def start(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> "Future[GrammarMasks | None]":
        """Begins to fill the masks of the rows of these slots, in their order.

        A slot may have several consecutive rows. `ahead`: by row, the tokens drafted before it, one more for each row.
        Behind a draft that the grammar forbids the mask allows all tokens, as such a row is never used. No slot may
        change until the result is there.
        """
        if not self._followers:
            nothing: Future[GrammarMasks | None] = Future()
            nothing.set_result(None)
            return nothing
        return self._aside.submit(self._fill, slots, ahead)

    def _fill(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> GrammarMasks | None:
        rows: list[int] = []
        lost: list[int] = []
        firsts: list[tuple[LLMatcher, int]] = []  # matcher, index in `rows` of its first row
        drafts: dict[int, Sequence[int]] = {}  # by that index: the longest draft
        for row, slot in enumerate(slots):
            follower = self._followers.get(slot)
            if follower is None:
                continue
            if follower.is_lost or follower.matcher is None:
                lost.append(row)
                continue
            if row not in ahead:
                firsts.append((follower.matcher, len(rows)))
            else:
                drafts[firsts[-1][1]] = ahead[row]
            rows.append(row)
            if follower.grammar is not None:
                follower.grammar.num_masks += 1
        bits: Bits = np.full((len(rows), self._width), -1, dtype=np.int32)
        plain = [(one, at) for one, at in firsts if at not in drafts]
        drafted = [(one, at, list(drafts[at])) for one, at in firsts if at in drafts]
        if plain:  # each call needs at least one entry
            fill_next_token_bitmask_par(self._threads, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._threads, drafted, bits)
        lost += [rows[at] for one, at in firsts if one.is_error()]
        if not rows and not lost:
            return None
        at_rows: Ints = np.array(rows, dtype=np.int64)
        return GrammarMasks(at_rows, bits, frozenset(lost), self._no_end)
