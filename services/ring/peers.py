"""Routing: returns the ids of the peers that a message goes to. Pure: no sockets.

The ring is gateway → tokenizer → engine → detokenizer → gateway. All messages of one attempt of a request go to the
same peer of a role: to the engine and the gateway that its envelope names, else by a hash of the request id.
"""

import dataclasses
from typing import assert_never

from sluice_server.services.messages.control import Operation, OperationAnswer
from sluice_server.services.messages.messages import (
    AdapterCall,
    Append,
    Blob,
    Cancel,
    CloseInput,
    Envelope,
    Failed,
    Grant,
    Inputs,
    KeepTrace,
    Message,
    OpenSerials,
    Preempted,
    Prompt,
    Result,
    Submit,
    Text,
    Tokens,
    Update,
)
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Mismatch, Probe, Report, Role

NEXT = {
    Role.GATEWAY: Role.TOKENIZER,
    Role.TOKENIZER: Role.ENGINE,
    Role.ENGINE: Role.DETOKENIZER,
    Role.DETOKENIZER: Role.GATEWAY,
}


_OF_ONE = (  # sent to the one peer that has their request
    Text,
    Tokens,
    Submit,
    Prompt,
    Failed,
    Result,
    Inputs,
    AdapterCall,
    Grant,
    Append,
    Update,
    CloseInput,
    Preempted,
    Blob,
)


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The peers of the next role, by id, as one stage knows them.

    Attributes:
        role: the role of the sending stage.
        ids: ids of the next role's processes, sorted, so that every process has the same order.
    """

    role: Role
    ids: tuple[str, ...]

    def targets(self, message: Message) -> tuple[str, ...]:
        """Returns the ids of the peers that get `message`; empty if the ring ends here or the peer is unknown."""
        if isinstance(message, _OF_ONE):  # a tuple with the most frequent types first, as this runs for every token
            return self._of_request(message.envelope)
        match message:
            case Cancel() | KeepTrace():
                # The gateway that sent it needs no answer.
                return () if self.role is Role.DETOKENIZER else self._of_request(message.envelope)
            case Probe():
                wanted = (*message.route, message.origin)
                return tuple(peer for peer in self.ids if peer in wanted)[:1]
            case OpenSerials():
                return () if self.role is Role.DETOKENIZER else self.ids
            case Mismatch():  # to all, as any of them may be gone
                return self.ids
            case CacheQuery():
                return self.ids[:1] if self.role is Role.GATEWAY else self.ids
            case Report() | CacheChanges():
                # One detokenizer forwards an engine's report to every gateway, and these to every tokenizer.
                return self.ids[:1] if self.role is Role.ENGINE else self.ids
            case Operation():
                return self._towards(message.target)
            case OperationAnswer():
                return self._towards(message.origin)
            case _:
                assert_never(message)

    def _towards(self, name: str) -> tuple[str, ...]:
        """Returns the process itself if it is a peer, else one on the way to it; the ring ends at the gateways."""
        if name in self.ids:
            return (name,)
        return () if self.role is Role.DETOKENIZER else self.ids[:1]

    def _of_request(self, envelope: Envelope) -> tuple[str, ...]:
        if self.role is Role.DETOKENIZER:
            return (envelope.origin,) if envelope.origin in self.ids else ()
        if self.role is Role.TOKENIZER and envelope.engine:  # one that has left is no other's work: it is sent again
            return (envelope.engine,) if envelope.engine in self.ids else ()
        return (peer_of(envelope.request_id, self.ids),)


def peer_of(request_id: str, ids: tuple[str, ...]) -> str:
    """Returns the process of one role that all messages of a request go to. `ids` is sorted."""
    return ids[int(request_id[:8], 16) % len(ids)]
