"""The state of one output of a request: the tokens received and the message that ended it."""

import dataclasses
from array import array

from sluice_server.services.messages.messages import Text


@dataclasses.dataclass(slots=True)
class OutputState:
    """The state of one output; grows with every message until `last` is set."""

    ids: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))  # tokens received
    num_reasoning: int = 0  # of these tokens, how many are reasoning
    came_s: float = 0.0  # arrival time of the latest token
    last: Text | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens received; the next message must start at this index."""
        return len(self.ids)

    def unfit(self, text: Text) -> str:
        """Returns why a message does not follow the received ones ("ended", "duplicate", "gap"), or ""."""
        if self.last is not None:
            return "ended"
        if text.first_index != len(self.ids):
            return "duplicate" if text.first_index < len(self.ids) else "gap"
        return ""

    def add(self, text: Text) -> None:
        """Appends a message for which `unfit` returned ""."""
        if len(text.tokens) == 1:
            self.ids.append(text.tokens[0].id)
        else:
            self.ids.extend([token.id for token in text.tokens])
        self.num_reasoning += text.num_reasoning
        if text.finish is not None:
            self.last = text
