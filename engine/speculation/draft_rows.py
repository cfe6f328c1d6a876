"""A sequence while a model or a head drafts for it: its tokens with the drafts, and how much of that is computed.

Tokens and counts in and out: knows no tensor.
"""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.plan import DraftRequest, DraftTree
from sluice_server.engine.speculation.proposer import Draft


@dataclasses.dataclass(slots=True)
class DrafterProgress:
    """What the drafter has computed of a sequence.

    Attributes:
        place: the table's, for which this is true.
        num: entries.
        fed: of these, the tokens of the last, which were drafts: some may not have been kept.
    """

    place: int
    num: int
    fed: list[int]

    def keep(self, tokens: Sequence[int]) -> None:
        """The drafts that were kept are tokens now: the others were never computed."""
        first = self.num - len(self.fed)
        for i, token in enumerate(self.fed):
            if first + i >= len(tokens) or tokens[first + i] != token:
                self.num = first + i
                break
        self.fed = []


@dataclasses.dataclass(slots=True)
class DraftRow:
    """A sequence while it is drafted for: its tokens with the drafts, of which `num` entries are computed.

    Attributes:
        at: its place among the rows of this time.
        lag: entries by which the drafter is behind the tokens that exist.
        others: of each draft, the alternatives to it, likelier ones first; nothing is computed of them.
    """

    at: int
    ask: DraftRequest
    read: DrafterProgress
    num: int
    lag: int
    drafts: list[int] = dataclasses.field(default_factory=list)
    others: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def answer(self) -> Draft:
        """The drafts, a tree where there are alternatives."""
        tree = [(token, i - 1) for i, token in enumerate(self.drafts)]
        tree += [(token, i - 1) for i, others in enumerate(self.others[: len(self.drafts)]) for token in others]
        if len(tree) == len(self.drafts):
            return self.drafts
        ids, parents = zip(*tree, strict=True)
        return DraftTree(ids, parents)

    @property
    def num_tokens(self) -> int:
        """With the drafts."""
        return len(self.ask.tokens) + len(self.drafts)

    @property
    def missing(self) -> int:
        """Entries to compute before the next token is drafted."""
        return self.num_tokens - self.lag - self.num

    @property
    def is_done(self) -> bool:
        """Whether it has all drafts that were asked for, or one that is no token: nothing follows that."""
        return len(self.drafts) >= self.ask.num or self.drafts[-1] < 0

    def take(self, num: int) -> Sequence[int]:
        """The tokens of the next `num` entries to compute."""
        first = self.num + self.lag
        behind = first - len(self.ask.tokens)
        if behind >= 0:
            return self.drafts[behind : behind + num]
        return self.ask.tokens[first : first + num]

    def forget(self) -> None:
        """What was computed of drafts is of use where it would be the same of tokens; a head's would not."""
        if self.drafts[-1] < 0:
            self.drafts.pop()
        num_fed = self.num - (len(self.ask.tokens) - self.lag)
        if self.lag:
            self.read.num -= num_fed
        else:
            self.read.fed = self.drafts[:num_fed]
