"""Who is next. Pure: a message in, the ids of the peers it goes to out.

The ring is gateway → tokenizer → engine → detokenizer → gateway. Everything of one request goes to the same peer of a
role (hash of its id), and home to the gateway that its envelope names. Knows nothing of sockets.
"""

import dataclasses
from typing import assert_never

from sluice_server.services.messages.messages import (
    Append,
    Blob,
    Cancel,
    CloseInput,
    Failed,
    Grant,
    KeepTrace,
    Message,
    Mismatch,
    OpenSerials,
    Preempted,
    Probe,
    Prompt,
    Report,
    Result,
    Role,
    Submit,
    Text,
    Tokens,
    Update,
)

NEXT = {
    Role.GATEWAY: Role.TOKENIZER,
    Role.TOKENIZER: Role.ENGINE,
    Role.ENGINE: Role.DETOKENIZER,
    Role.DETOKENIZER: Role.GATEWAY,
}


_OF_ONE = (  # go to the one peer that has their request
    Text,
    Tokens,
    Submit,
    Prompt,
    Failed,
    Result,
    Grant,
    Append,
    Update,
    CloseInput,
    Preempted,
    Blob,
)


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The peers of the next role, by id, as one stage sees them.

    Attributes:
        role: the role of the stage that sends.
        ids: the next role's processes in the order that every process uses (sorted).
    """

    role: Role
    ids: tuple[str, ...]

    def targets(self, message: Message) -> tuple[str, ...]:
        """Ids of the peers that get `message`; empty when the ring ends here or the peer is unknown."""
        if isinstance(message, _OF_ONE):  # by a tuple, most frequent first: this runs for every token
            return self._of_request(message.envelope.request_id, message.envelope.origin)
        match message:
            case Cancel() | KeepTrace():
                # The gateway that sends it needs no answer.
                return () if self.role is Role.DETOKENIZER else self._of_request(message.envelope.request_id, "")
            case Probe():
                wanted = (*message.route, message.origin)
                return tuple(peer for peer in self.ids if peer in wanted)[:1]
            case OpenSerials():
                return () if self.role is Role.DETOKENIZER else self.ids
            case Mismatch():  # whichever of the next processes may be gone
                return self.ids
            case Report():
                # One detokenizer passes an engine's report on to every gateway.
                return self.ids if self.role is Role.DETOKENIZER else self.ids[:1]
            case _:
                assert_never(message)

    def _of_request(self, request_id: str, origin: str) -> tuple[str, ...]:
        if self.role is Role.DETOKENIZER:
            return (origin,) if origin in self.ids else ()
        return (peer_of(request_id, self.ids),)


def peer_of(request_id: str, ids: tuple[str, ...]) -> str:
    """Which of one role's processes, sorted by id, everything of a request goes to."""
    return ids[int(request_id[:8], 16) % len(ids)]
