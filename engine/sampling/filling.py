"""Masks of matchers, filled by a thread of its own that leaves the interpreter to others.

Matchers and drafts in, bits out, in the order in which they are asked for: one job at a time, so that what is asked for
last finds matchers at rest. Knows no slots and no rows.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from engine.sampling.rows import Bits


class Filled(NamedTuple):
    """Attributes:
    bits: int32 [masks, W], those of each want in turn.
    lost: the wants whose matcher cannot go on; their bits mean nothing.
    """

    bits: Bits
    lost: frozenset[int]


class Known(NamedTuple):
    """A mask that has been asked for before."""

    filled: "Future[Filled]"
    at: int  # of its wants, which have one mask each


class Want(NamedTuple):
    """The masks of one matcher, None if there is none: where it is, and behind each of `drafts`."""

    matcher: LLMatcher | None
    drafts: Sequence[int] = ()
    known: Known | None = None


class Filler:
    """Of masks `width` words wide."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._threads = LLExecutor()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def fill(self, wants: Sequence[Want]) -> "Future[Filled]":
        """Nobody may touch these matchers before the result is there. Behind a drafted token that is not allowed,
        everything is: nobody gets there."""
        return self._aside.submit(self._fill, wants)

    def _fill(self, wants: Sequence[Want]) -> Filled:
        plain: list[tuple[LLMatcher, int]] = []  # and the index of the first mask
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        lost, end = set[int](), 0
        known: list[tuple[int, Known]] = []
        for at, (matcher, drafts, before) in enumerate(wants):
            if matcher is None or matcher.is_error():
                lost.add(at)
            elif drafts:
                drafted.append((matcher, end, list(drafts)))
            elif before is not None and before.filled.exception() is None:
                known.append((end, before))
            else:
                plain.append((matcher, end))
            end += 1 + len(drafts)
        bits: Bits = np.full((end, self._width), -1, dtype=np.int32)
        if plain:  # either call wants at least one
            fill_next_token_bitmask_par(self._threads, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._threads, drafted, bits)
        for to, (filled, at) in known:
            bits[to] = filled.result().bits[at]
        lost.update(at for at, want in enumerate(wants) if want.matcher is not None and want.matcher.is_error())
        return Filled(bits, frozenset(lost))
