"""A sequence while a model or a head drafts for it: its tokens with the drafts, and how many are computed.

Pure: tokens and counts in and out, no tensors.
"""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.plan import DraftRequest, DraftTree
from sluice_server.engine.speculation.proposer import Draft


@dataclasses.dataclass(slots=True)
class DrafterProgress:
    """What the drafter has computed of a sequence.

    Attributes:
        place: number of the block table for which this holds, see `DraftRequest.place`.
        num: computed entries.
        fed: the tokens of the last of these entries, which were drafts; some may not have been kept.
    """

    place: int
    num: int
    fed: list[int]

    def keep(self, tokens: Sequence[int]) -> None:
        """Keeps the entries whose drafts became tokens and drops those behind the first that did not."""
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
        at: index among the rows of this call.
        lag: entries by which the drafter is behind the existing tokens.
        others: per draft, the alternatives to it, likelier ones first; no entries are computed for these.
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
        """The drafts; a tree if there are alternatives."""
        tree = [(token, i - 1) for i, token in enumerate(self.drafts)]
        tree += [(token, i - 1) for i, others in enumerate(self.others[: len(self.drafts)]) for token in others]
        if len(tree) == len(self.drafts):
            return self.drafts
        ids, parents = zip(*tree, strict=True)
        return DraftTree(ids, parents)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, drafts included."""
        return len(self.ask.tokens) + len(self.drafts)

    @property
    def missing(self) -> int:
        """The entries to compute before the next token is drafted."""
        return self.num_tokens - self.lag - self.num

    @property
    def is_done(self) -> bool:
        """Whether all requested drafts are made, or the last one is invalid (negative), which ends the draft."""
        return len(self.drafts) >= self.ask.num or self.drafts[-1] < 0

    def take(self, num: int) -> Sequence[int]:
        """Returns the tokens of the next `num` entries to compute."""
        first = self.num + self.lag
        behind = first - len(self.ask.tokens)
        if behind >= 0:
            return self.drafts[behind : behind + num]
        return self.ask.tokens[first : first + num]

    def forget(self) -> None:
        """Ends drafting. Keeps a model's entries of drafts, which equal those of tokens; drops a head's."""
        if self.drafts[-1] < 0:
            self.drafts.pop()
        num_fed = self.num - (len(self.ask.tokens) - self.lag)
        if self.lag:
            self.read.num -= num_fed
        else:
            self.read.fed = self.drafts[:num_fed]
