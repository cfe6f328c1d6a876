"""What became of drafted tokens: counted for an engine, and for each request. Stdlib only."""

import dataclasses


@dataclasses.dataclass(slots=True)
class DraftStats:
    """Tokens since the start of whatever this is kept for, in all and by their place in the draft: in a tree by their
    order, the first branch first, and of those accepted by how far they stand behind the last token."""

    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = dataclasses.field(default_factory=list)
    accepted_at: list[int] = dataclasses.field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """One draft was verified."""
        missing = drafted - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        self.num_drafted += drafted
        self.num_accepted += accepted
        for i in range(drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted
