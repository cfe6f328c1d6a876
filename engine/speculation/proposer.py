"""The protocol of draft proposers, and the function that calls them.

A proposer is not trusted: if it raises or returns an invalid token, its drafts are dropped and the request goes on.
"""

import logging
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from sluice_server.engine.plan import DraftRequest, DraftTree
from sluice_server.engine.speculation.trees import is_tree

logger = logging.getLogger(__name__)


Draft: TypeAlias = Sequence[int] | DraftTree


class Proposer(Protocol):
    """Guesses how sequences continue.

    Attributes:
        writes_cache: whether it computes into the sequences' blocks and so needs capacity in them.
    """

    writes_cache: bool

    def propose(self, asks: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Returns, per request in order, at most `ask.num` tokens that may follow `ask.tokens`, or none.

        If `ask.width` is above 1, the result may be a tree of at most `ask.num * ask.width` tokens.
        """


def proposals(proposer: Proposer, asks: Sequence[DraftRequest], vocab_size: int) -> list[Draft]:
    """Returns the proposer's drafts, empty where it failed.

    If the call for all requests fails, the proposer is called once per request.
    """
    try:
        answers = proposer.propose(asks)
        if len(answers) == len(asks):
            return [_checked(answer, ask, vocab_size) for answer, ask in zip(answers, asks, strict=True)]
        logger.error("%s answered %d of %d", type(proposer).__name__, len(answers), len(asks))
    except Exception:
        logger.exception("%s failed for %d sequences", type(proposer).__name__, len(asks))
    return [answer for ask in asks for answer in proposals(proposer, [ask], vocab_size)] if len(asks) > 1 else [()]


def _checked(answer: Draft, ask: DraftRequest, vocab_size: int) -> Draft:
    ids = answer.token_ids if isinstance(answer, DraftTree) else answer
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
        logger.error("drafted %s, of which some are not in [0, %d)", list(ids), vocab_size)
        return ()
    if not isinstance(answer, DraftTree):
        return answer[: ask.num]
    parents = answer.parents
    if len(parents) != len(ids) or not is_tree(parents) or ask.width == 1:
        logger.error("drafted a tree with parents %s for %d tokens, width %d", list(parents), len(ids), ask.width)
        return ()
    most = ask.num * ask.width
    return DraftTree(answer.token_ids[:most], parents[:most])
