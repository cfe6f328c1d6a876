"""Counts drafted and accepted tokens, for an engine and for each request. Stdlib only."""

import dataclasses


@dataclasses.dataclass(slots=True)
class DraftStats:
    """Tokens drafted and accepted since start, in all and by position.

    Attributes:
        drafted_at: counts by position in the draft; in a tree by order, the first branch first.
        accepted_at: counts by distance behind the last token.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = dataclasses.field(default_factory=list)
    accepted_at: list[int] = dataclasses.field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """Counts one verified draft of `drafted` tokens, of which `accepted` were kept."""
        missing = drafted - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        self.num_drafted += drafted
        self.num_accepted += accepted
        for i in range(drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted
