"""Ends requests that fail in the ring: a stage raised on one of their messages, or a message could not be sent.

Each such request ends with one Failed message, and the stage drops its state. Stages are used through `Handler` only.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.errors import ServiceError, backlog_full
from sluice_server.services.faults import fault
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, KeepTrace, Message, OfNoRequest, failed
from sluice_server.services.messages.processes import Role
from sluice_server.services.ring.backlog import MAX_BYTES, Refusal
from sluice_server.services.telemetry.logs import about

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """The part of a stage that is needed here."""

    def handle(self, message: Message) -> None:
        """Handle one message."""


class RequestEnds:
    """Ends the failed requests of one process."""

    def __init__(self, role: Role, process_id: str, emit: Callable[[Message], None], counts: Counter[str]) -> None:
        self._role = role
        self._process_id = process_id
        self._emit = emit
        self._counts = counts
        self._unsent: dict[str, tuple[Envelope, ServiceError]] = {}  # requests with a message that could not be sent

    def not_handled(self, stage: Handler, message: Message, error: Exception) -> None:
        """Fail the request of `message`, on which the stage just raised `error`."""
        self._counts["handler_errors"] += 1
        kind = type(message).__name__
        if isinstance(message, OfNoRequest):
            logger.error("%s could not handle a %s", self._process_id, kind, exc_info=error)
            return
        extra = about(message.envelope, message=kind)
        self._end(stage, message.envelope, fault(self._role, extra, "failed on a message of this request", error))

    def not_sent(self, message: Message, refusal: Refusal, num_bytes: int) -> None:
        """Note that a message could not be queued, so that its request fails. Messages that end a request, or belong
        to none, are only counted."""
        self._counts["dropped"] += 1
        if isinstance(message, Failed | Cancel | KeepTrace | OfNoRequest):
            return
        if refusal is Refusal.FULL:
            error = backlog_full(self._role, num_bytes, MAX_BYTES)
            self._unsent.setdefault(message.envelope.request_id, (message.envelope, error))
        elif message.envelope.request_id not in self._unsent:
            what = "made a message of this request that is larger than the ring carries"
            error = fault(self._role, about(message.envelope), what)
            self._unsent[message.envelope.request_id] = message.envelope, error

    def end_unsent(self, stage: Handler) -> None:
        """End the noted requests. Called at the end of a turn: earlier, the stage may be in the middle of their
        work."""
        while self._unsent:
            _, (envelope, error) = self._unsent.popitem()
            self._end(stage, envelope, error)

    def _end(self, stage: Handler, envelope: Envelope, error: ServiceError) -> None:
        """End a request in this stage, and send its client the error."""
        if self._role is Role.GATEWAY:
            self._emit(Cancel(envelope))
            self._handle(stage, failed(envelope, error))
        else:
            self._handle(stage, Cancel(envelope))
            self._emit(failed(envelope, error))

    def _handle(self, stage: Handler, message: Cancel | Failed) -> None:
        """Pass a message to the stage. An error here is only counted: the error that caused it has been logged."""
        try:
            stage.handle(message)
        except Exception:
            self._counts["handler_errors"] += 1
