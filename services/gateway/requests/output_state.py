"""One output of a request: the tokens that came, and the message that ended it."""

import dataclasses
from array import array

from sluice_server.services.messages.messages import Text


@dataclasses.dataclass(slots=True)
class OutputState:
    """Grows with every message until `last`."""

    ids: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))  # received
    num_reasoning: int = 0  # of them
    came_s: float = 0.0  # the latest of them
    last: Text | None = None

    @property
    def num_tokens(self) -> int:
        """Received: the next message must start here."""
        return len(self.ids)

    def unfit(self, text: Text) -> str:
        """Why a message does not follow what came, or ""."""
        if self.last is not None:
            return "ended"
        if text.first_index != len(self.ids):
            return "duplicate" if text.first_index < len(self.ids) else "gap"
        return ""

    def add(self, text: Text) -> None:
        """A message that fits has come."""
        self.ids.extend([token.id for token in text.tokens])
        self.num_reasoning += text.num_reasoning
        if text.finish is not None:
            self.last = text
