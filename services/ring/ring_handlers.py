"""Handles the messages of the ring that no stage needs: probes, traces to keep, operations, work for other revisions.

A process says with `RingHandlers` which model it serves, and what it does when it hears of one of these.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from sluice_server.engine.errors import other_revision
from sluice_server.services.checkpoint.revisions import fits
from sluice_server.services.messages.control import Operation, OperationAnswer
from sluice_server.services.messages.messages import (
    Append,
    Inputs,
    KeepTrace,
    Message,
    Prompt,
    Submit,
    Tokens,
    failed,
)
from sluice_server.services.messages.processes import Mismatch, Probe, Role, Visit
from sluice_server.services.ring.leases import Leases
from sluice_server.services.ring.stage import Stage

HandlersByType: TypeAlias = dict[type, Callable[[Stage, Any], bool]]  # each returns whether the message is handled


def _ignore(request_id: str) -> None:
    """The default of `on_keep`: no trace is held."""


def _unserved(operation: Operation) -> None:
    """The default of `on_operation`: this process serves none."""


def _unasked(probe: Probe) -> None:
    """The default of `on_probe`: this process needs nothing that probes say."""


def _nothing() -> None:
    """The default of `on_mixed`: this process's files cannot have changed."""


class RingHandlers:
    """The handlers of one process that run before its stage's.

    Attributes:
        revision: the one that this process serves; work for another one fails.
        identity: that of an engine's cache; told by probes, as the revision is.
        on_keep: called when the trace of a request is to be kept.
        on_probe: called with each probe that visits this process.
        on_mixed: called when the ring's processes serve different revisions.
        on_operation: called with those that name this process.
        by_type: the handlers by type of message; what they do not handle, the stage gets.
    """

    def __init__(
        self,
        role: Role,
        process: tuple[str, int],
        leases: Leases,
        emit: Callable[[Message], None],
        num_lost: Callable[[], int],
    ) -> None:
        """`process`: id and boot epoch. `num_lost` returns how many messages to and from this process are lost."""
        self.revision = self.identity = ""
        self.on_keep: Callable[[str], None] = _ignore
        self.on_probe: Callable[[Probe], None] = _unasked
        self.on_mixed: Callable[[], None] = _nothing
        self.on_operation: Callable[[Operation], None] = _unserved
        self._role = role
        self._process_id, self._epoch = process
        self._leases = leases
        self._emit = emit
        self._num_lost = num_lost
        self.by_type: HandlersByType = {
            KeepTrace: self._pass_keep,
            Submit: self._refuse_revision,
            Prompt: self._refuse_revision,
            Inputs: self._refuse_revision,
            Append: self._refuse_revision,
            Tokens: self._refuse_first_tokens,
            Operation: self._take_operation,
        }
        if role is not Role.GATEWAY:
            self.by_type |= {Probe: self._pass_probe, Mismatch: self._pass_on, OperationAnswer: self._pass_on}

    def _pass_probe(self, stage: Stage, probe: Probe) -> bool:
        self._leases.seen(probe.origin, probe.epoch)
        self.on_probe(probe)
        if probe.is_mixed:
            self.on_mixed()
        place = self._role, self._process_id, self._epoch
        visit = Visit(*place, stage.progress, self._num_lost(), self.revision, self.identity)
        self._emit(msgspec.structs.replace(probe, visits=(*probe.visits, visit)))
        return True

    def _pass_keep(self, stage: Stage, keep: KeepTrace) -> bool:
        self.on_keep(keep.envelope.request_id)
        self._emit(keep)
        return True

    def _refuse_first_tokens(self, stage: Stage, tokens: Tokens) -> bool:
        """Check the revision of an output's first Tokens only: it creates the state that the later ones need."""
        return tokens.admitted is not None and self._refuse_revision(stage, tokens)

    def _refuse_revision(self, stage: Stage, message: Submit | Prompt | Inputs | Append | Tokens) -> bool:
        """Fail a message for another revision. Returns whether it was one."""
        wanted = message.envelope.revision
        if not wanted or fits(wanted, self.revision):
            return False
        self._emit(failed(message.envelope, other_revision(wanted, self.revision)))
        return True

    def _take_operation(self, stage: Stage, operation: Operation) -> bool:
        if operation.target == self._process_id:
            self.on_operation(operation)
        else:
            self._emit(operation)
        return True

    def _pass_on(self, stage: Stage, message: Message) -> bool:
        self._emit(message)
        return True
