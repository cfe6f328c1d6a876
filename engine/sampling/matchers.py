"""The grammars that outputs follow, slot by slot, and the masks of ids that each allows next.

A matcher is rolled forward from the tokens themselves whenever a sequence takes a slot, so that it is the same after
preemption, replay and forks. Masks are asked for as soon as the tokens before them are sampled, where that is certain,
and filled by a thread of their own while the model computes. What goes wrong with one matcher is told for its row
only. Knows no logits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np
from llguidance import LLMatcher

from engine.errors import ServiceError
from engine.plan import Placement
from engine.sampling.filling import Filled, Filler, Known, Want
from engine.sampling.grammars import Grammars
from engine.sampling.rows import Ints, Masks, Words


@dataclasses.dataclass(slots=True, eq=False)
class Follower:
    """One output's matcher.

    Attributes:
    matcher: None when the grammar could not be had.
    num_tokens: of prompt and output, as far as it has been told.
    ahead: what was sampled behind these and nobody has told yet, though the matcher has followed it.
    version: another one whenever the matcher is somewhere else.
    """

    matcher: LLMatcher | None
    num_tokens: int
    ahead: int | None = None
    version: int = 0

    def append(self, tokens: Sequence[int]) -> None:
        """The output goes on."""
        self.num_tokens += len(tokens)
        self.version += 1
        if self.matcher is not None and tokens:
            self.matcher.consume_tokens(list(tokens))

    def foresee(self, token: int) -> None:
        """The output will go on with the token, if all goes well."""
        self.ahead = token
        self.version += 1
        if self.matcher is not None:
            self.matcher.consume_token(token)

    def confirm(self) -> None:
        """It has."""
        self.ahead = None
        self.num_tokens += 1

    def retract(self) -> None:
        """It has not."""
        self.ahead = None
        self.version += 1
        if self.matcher is not None:
            self.matcher.rollback(1)  # if that fails the matcher is lost, and says so


@dataclasses.dataclass(frozen=True, slots=True)
class _Early:
    """Masks that are being filled before anybody has asked for them: of these followers as they were then."""

    followers: list[Follower]
    versions: list[int]
    filled: "Future[Filled]"

    def is_of(self, followers: list[Follower]) -> bool:
        """Whether these are theirs, in this order."""
        return self.followers == followers and self.versions == [one.version for one in followers]

    def known(self) -> dict[Follower, Known]:
        """Those that are still of use."""
        each = enumerate(zip(self.followers, self.versions, strict=True))
        return {one: Known(self.filled, at) for at, (one, version) in each if one.version == version}


@dataclasses.dataclass(frozen=True, slots=True)
class Filling:
    """Masks of rows, on their way.

    Attributes:
        rows: that follow a grammar.
        ends: how many of these the first follower has, then the first two, and so on.
        no_end: every bit but those of ends of the sequence.
    """

    rows: list[int]
    ends: list[int]
    no_end: Words
    filled: "Future[Filled] | None"

    def result(self) -> Masks | None:
        """The masks, when they are there; None if no row follows a grammar."""
        if self.filled is None:
            return None
        bits, lost = self.filled.result()
        rows: Ints = np.array(self.rows, dtype=np.int64)
        if not lost:
            return Masks(rows, bits, frozenset(), self.no_end)
        firsts = [0, *self.ends]
        gone = [k for at in lost for k in range(firsts[at], firsts[at + 1])]
        return Masks(np.delete(rows, gone), np.delete(bits, gone, axis=0), frozenset(rows[gone].tolist()), self.no_end)


class SlotMatchers:
    """Indexed by slot, for those whose output is constrained."""

    def __init__(self, grammars: Grammars, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos_ids = frozenset(eos_ids)
        self._no_end: Words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
        for token in eos_ids:
            self._no_end[token // 32] ^= np.uint32(1 << token % 32).view(np.int32)
        self._followers: dict[int, Follower] = {}
        self._filler = Filler(len(self._no_end))
        self._early: _Early | None = None

    def listens(self, slot: int) -> bool:
        """Whether the slot wants to know its tokens."""
        return slot in self._followers

    def reset(self, placement: Placement) -> None:
        """Forget whoever had the slot: its masks may still be on their way, and nobody will ask for them."""
        self._followers.pop(placement.slot, None)
        if not placement.params.grammar:
            return
        try:
            matcher = self._grammars.compile(placement.params.grammar).matcher()
        except ServiceError:  # it compiled when it came in: told when the row samples
            matcher = None
        follower = Follower(matcher, placement.num_prompt)
        follower.append(placement.tokens[placement.num_prompt :])
        self._followers[placement.slot] = follower

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """The slot samples the token at `position` now: of `computed`, which end right before it, some may be new."""
        follower = self._followers.get(slot)
        if follower is None:
            return
        num = position - follower.num_tokens
        new = computed[-num:] if num > 0 else ()
        if follower.ahead is not None:
            if new and new[0] == follower.ahead:
                follower.confirm()
                new = new[1:]
            else:  # a step once more, or another token
                self._settle()
                follower.retract()
        if new:
            self._settle()
            follower.append(new)

    def start(self, slots: Sequence[int], ahead: Mapping[int, Sequence[int]]) -> Filling:
        """Begin to fill the masks of the rows of these slots, in their order, or find those that have been begun.

        A slot may have several rows, one behind the other; `ahead`: tokens drafted before such a row, each row's one
        longer than the last one's. Behind a drafted token that the grammar does not allow, everything is allowed:
        nobody gets there. No slot may change before the result is there.
        """
        rows: list[int] = []
        ends: list[int] = []
        followers: list[Follower] = []
        drafts: dict[Follower, Sequence[int]] = {}  # the longest
        for row, slot in enumerate(slots) if self._followers else ():
            follower = self._followers.get(slot)
            if follower is None:
                continue
            rows.append(row)
            if row in ahead:
                drafts[follower] = ahead[row]
                ends[-1] = len(rows)
            else:
                followers.append(follower)
                ends.append(len(rows))
        return Filling(rows, ends, self._no_end, self._filled(followers, drafts) if rows else None)

    def _filled(self, followers: list[Follower], drafts: Mapping[Follower, Sequence[int]]) -> "Future[Filled]":
        early = self._early
        if early is not None and early.filled.done() and early.filled.exception() is not None:
            early = self._early = None  # which is told when the same goes wrong once more
        if early is not None and not drafts and early.is_of(followers):
            return early.filled
        known = {} if early is None else early.known()
        return self._filler.fill([Want(one.matcher, drafts.get(one, ()), known.get(one)) for one in followers])

    def go_on(self, slots: Sequence[int], ids: Sequence[int]) -> None:
        """These slots have sampled these tokens: begin to fill the masks behind them.

        If they are told others, or none, nothing has happened. To be called when nothing can go wrong with the step any
        more, as a slot that samples at the same position again has to go back.
        """
        if not self._followers:
            return
        followers: list[Follower] = []
        for slot, token in zip(slots, ids, strict=True):
            follower = self._followers.get(slot)
            # behind an end nobody samples, and not every matcher can go back there
            if follower is not None and token not in self._eos_ids:
                follower.foresee(token)
                followers.append(follower)
        if followers:
            wants = [Want(one.matcher) for one in followers]
            self._early = _Early(followers, [one.version for one in followers], self._filler.fill(wants))

    def _settle(self) -> None:
        """Matchers are touched by one thread at a time."""
        if self._early is not None:
            wait((self._early.filled,))
