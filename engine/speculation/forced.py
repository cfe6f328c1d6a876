"""Drafts what a grammar forces: tokens of text in which it leaves no choice, such as the names of a schema's fields.

Between them a grammar often leaves white space open, and an output mostly writes it as it did before: such tokens,
without a letter or digit, are drafted as they followed one another last, where the grammar allows it. Needs no model
and no device memory. A draft is right where the model writes the text in the tokens of its tokenizer;
as every draft it is verified, so that no token changes.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from llguidance import LLMatcher

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import DraftRequest
from sluice_server.engine.sampling.grammars import Grammar, Grammars


@dataclasses.dataclass(slots=True)
class _Position:
    """How far a matcher has followed a sequence. `grammar` is held so that it stays cached."""

    grammar: Grammar
    matcher: LLMatcher
    num_tokens: int
    followers: dict[int, int] = dataclasses.field(default_factory=dict)  # signs of the output → what followed them last


class ForcedProposer:
    """Drafts from a matcher per sequence, which is kept in the sequence's `ProposerMemory`."""

    writes_cache = False

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def propose(self, asks: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """Implements `Proposer.propose`."""
        return [self._forced(ask) for ask in asks]

    def _forced(self, ask: DraftRequest) -> Sequence[int]:
        at = ask.memory.state
        if not isinstance(at, _Position):
            found = self._start(ask)
            if found is None:
                return ()
            at = ask.memory.state = found
        new = ask.tokens[at.num_tokens :]
        ask.memory.num_read = len(new)
        if new and not at.matcher.consume_tokens(list(new)):
            return ()  # the output has left the grammar: its row fails when it samples
        for one, after in itertools.pairwise(ask.tokens[max(ask.num_prompt, at.num_tokens - 1) :]):
            if self._grammars.is_sign(one) and self._grammars.is_sign(after):
                at.followers[one] = after
        at.num_tokens = len(ask.tokens)
        return _drafts(at, ask.tokens[-1], ask.num)

    def _start(self, ask: DraftRequest) -> _Position | None:
        if not ask.params.grammar:
            return None
        try:
            grammar = self._grammars.compile(ask.params.grammar)
        except ServiceError:  # its row fails when it samples
            return None
        return _Position(grammar, grammar.matcher(), ask.num_prompt)


def _drafts(at: _Position, last: int, num: int) -> list[int]:
    """Returns at most `num` tokens that may follow `last`: those that are forced, and signs in between."""
    drafts: list[int] = []
    while len(drafts) < num:
        more = at.matcher.compute_ff_tokens()
        if not more:
            follower = at.followers.get(drafts[-1] if drafts else last)
            if follower is None or not at.matcher.validate_tokens([follower]):
                break
            more = [follower]
        more = more[: num - len(drafts)]
        if not at.matcher.consume_tokens(more):
            break
        drafts += more
    at.matcher.rollback(len(drafts))
    return drafts
