"""The event loop of every stage: drain the inbox, let the stage work, flush the outboxes.

It runs as callbacks on an asyncio loop. Routing, frames and counters are handled here; what concerns the ring itself by
`ring_handlers`, other messages by the stage, and errors that a stage raises by `request_ends`. Stages are a `Stage`
(`stage`) to it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping

from sluice_server.engine.errors import schema_mismatch
from sluice_server.services.messages.messages import (
    SCHEMA_VERSION,
    Blob,
    Cancel,
    KeepTrace,
    Message,
)
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.ring.leases import Leases
from sluice_server.services.ring.peers import NextHop
from sluice_server.services.ring.request_ends import RequestEnds
from sluice_server.services.ring.ring_handlers import HandlersByType, RingHandlers
from sluice_server.services.ring.schema_mismatches import SchemaMismatches
from sluice_server.services.ring.sockets import Inbox, Outbox, Peer
from sluice_server.services.ring.stage import Stage
from sluice_server.services.ring.transport import Transport

logger = logging.getLogger(__name__)

EXIT_BROKEN = 70  # EX_SOFTWARE
RETRY_S = 0.02  # delay before a flush that met EAGAIN is tried again


class RingLoop:
    """Connects one process to the ring.

    Attributes:
        handlers: of messages that no stage needs; told which model this process serves.
    """

    def __init__(
        self,
        role: Role,
        process_id: str,
        inbox: str,
        peers: Mapping[str, str],
        max_message_bytes: int,
        transport: Transport | None = None,
    ) -> None:
        """`peers` is the table {id: address} of the next role; `transport` has the keys that tcp needs, or is one that
        several rings share. Binds `inbox`; raises zmq.ZMQError or OSError if it cannot."""
        self.process_id = process_id
        self.epoch = time.time_ns()
        self.counts: Counter[str] = Counter()
        self.leases = Leases()
        self._role = role
        self._hop = NextHop(role, tuple(sorted(peers)))
        self._transport = transport or Transport()
        self._max_message_bytes = max_message_bytes
        self.inbox = Inbox(self._transport.context, inbox, max_message_bytes, self._transport.keys, role)
        self._transport.open()
        self.outboxes = {peer: self._outbox(Peer(peer, address), self.epoch) for peer, address in peers.items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stage: Stage | None = None
        self._scheduled = False
        self._is_turning = False
        self._is_leaving = False  # a flush is scheduled for what was emitted outside a turn
        self._num_dropped = 0  # messages of requests for engines that have left, and may be back before others notice
        self._later: list[Message] = []  # messages that came while the stage was computing
        self._ends = RequestEnds(role, process_id, self.emit, self.counts)
        self._schema_mismatches = SchemaMismatches(process_id, SCHEMA_VERSION)
        self.handlers = RingHandlers(role, (process_id, self.epoch), self.leases, self.emit, self._num_lost)
        self._before_stage: HandlersByType = {**self.handlers.by_type, Blob: self._hand_on}

    @property
    def mismatch(self) -> str:
        """Returns one line about neighbours with another schema version, for operators; "" if none was heard lately."""
        return self._schema_mismatches.summary(time.monotonic())

    def change_peers(self, peers: Mapping[str, str]) -> None:
        """Make these the processes of the next role: connect to those that joined, and close the outboxes of those that
        left or have another address. Raises ServiceError for a peer without a key, which is left out."""
        for name in [one for one, outbox in self.outboxes.items() if peers.get(one) != outbox.address]:
            outbox = self.outboxes.pop(name)
            self._num_dropped += outbox.backlog
            outbox.drop(lambda envelope: True)
            outbox.close()
        try:
            for name in sorted(peers.keys() - self.outboxes.keys()):
                # Of an epoch of its own: to a peer that has heard of this process, its first frame is no repetition.
                self.outboxes[name] = self._outbox(Peer(name, peers[name]), time.time_ns())
        finally:
            self._hop = NextHop(self._role, tuple(sorted(self.outboxes)))

    def _outbox(self, peer: Peer, epoch: int) -> Outbox:
        context, keys = self._transport.context, self._transport.keys
        return Outbox(context, peer, self.process_id, epoch, self._max_message_bytes, keys)

    def start(self, stage: Stage) -> None:
        """Start to run `stage` on the running asyncio loop."""
        self._loop = asyncio.get_running_loop()
        self._stage = stage
        self._loop.add_reader(self.inbox.fd, self.schedule)
        self.schedule()

    def stop(self) -> None:
        """Stop the loop; flush and close the sockets."""
        if self._loop is not None:
            self._loop.remove_reader(self.inbox.fd)
            self._loop = None
        self._flush()
        self.inbox.close()
        for outbox in self.outboxes.values():
            outbox.close()
        self._transport.close()

    def schedule(self) -> None:
        """Schedule a turn; cheap if one is scheduled already."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def emit(self, message: Message) -> None:
        """Send a message to its peers at the end of this turn, or, outside a turn, behind what runs now; a Cancel at
        once. Never blocks."""
        targets = self._hop.targets(message)
        if not targets and not isinstance(message, Cancel | KeepTrace):
            self.counts["unroutable"] += 1
            self._num_dropped += self._role is Role.TOKENIZER and hasattr(message, "envelope")
        for peer in targets:
            refusal = self.outboxes[peer].put(message)
            if refusal is not None:
                self._ends.not_sent(message, refusal, self.outboxes[peer].backlog_bytes)
        if isinstance(message, Cancel) and not self._is_turning:
            self._flush()  # frees what its request holds at once, before other queued work of this process
        if not (self._scheduled or self._is_leaving) and self._loop is not None:  # else it leaves with a turn
            self._is_leaving = True
            self._loop.call_soon(self._leave)

    def mend(self) -> None:
        """Bind the inbox again if its socket file was removed; called periodically."""
        if self.inbox.mend():
            logger.warning("%s listens again: the file of its socket was gone", self.process_id)

    def reap(self) -> None:
        """Drop queued messages of requests whose gateways are gone; called periodically."""
        for outbox in self.outboxes.values():
            outbox.drop(self.leases.is_over)

    def attend(self) -> None:
        """Answer probes now. For a stage that computes for long: called between two pieces of its work. Other
        messages wait, in order, until the next turn."""
        if self._stage is None:
            return
        came = self.inbox.drain()
        self.counts["messages"] += len(came)
        for message in came:
            if isinstance(message, Probe):
                self._take(self._stage, message)
            else:
                self._later.append(message)
        self._flush()

    def _turn(self) -> None:
        if self._loop is None or self._stage is None:
            return
        came = self.inbox.drain()
        self.counts["messages"] += len(came)
        later, self._later = self._later, []
        self._is_turning = True
        try:
            for message in (*later, *came):
                self._take(self._stage, message)
            again = self._work(self._stage)
            self._report_other_versions(self._stage)
            self._ends.end_unsent(self._stage)
        finally:
            self._is_turning = False
            self._scheduled = False  # set here: messages emitted above are sent in this turn and need no other
        if self._flush():
            self._loop.call_later(RETRY_S, self.schedule)
        if again or self._later or self.inbox.has_more:
            self.schedule()

    def _leave(self) -> None:
        """Send what was emitted outside a turn: without one, which would look for messages that have not come."""
        self._is_leaving = False
        if self._loop is None or self._stage is None:
            return
        self._ends.end_unsent(self._stage)
        if self._flush():
            self._loop.call_later(RETRY_S, self.schedule)

    def _work(self, stage: Stage) -> bool:
        try:
            return stage.turn()
        except Exception as error:
            # No single request caused this: end, and let the supervisor start a clean process. Turns that are scheduled
            # already come while the loop ends: they must not end it for another reason.
            self._stage = None
            logger.critical("%s cannot go on", self.process_id, exc_info=True)
            raise SystemExit(EXIT_BROKEN) from error

    def _take(self, stage: Stage, message: Message) -> None:
        handler = self._before_stage.get(type(message))
        if handler is not None and handler(stage, message):
            return
        try:
            stage.handle(message)
        except Exception as error:
            # A bug met by one message must fail that request only, and must always end it.
            self._ends.not_handled(stage, message, error)

    def _num_lost(self) -> int:
        return self.inbox.counts["lost"] + self._num_dropped  # of both, requests may have to be sent again

    def _hand_on(self, stage: Stage, blob: Blob) -> bool:
        """Forward a large message that this stage does not need to read."""
        targets = self._hop.targets(blob)
        self.emit(self.inbox.hand_on(blob, self.outboxes[targets[0]] if targets else None))
        return True

    def _report_other_versions(self, stage: Stage) -> None:
        """Report neighbours whose frames are refused to the log and to the gateways."""
        if not self.inbox.other_versions:
            return
        headers, self.inbox.other_versions = list(self.inbox.other_versions.values()), {}
        for found, is_new in self._schema_mismatches.record(headers, time.monotonic()):
            if is_new:
                error = schema_mismatch(found.reader, found.reader_schema, found.sender, found.sender_schema)
                logger.error("frames of %s are refused: %s", found.sender, error.message)
            if self._role is Role.GATEWAY:
                stage.handle(found)
            else:
                self.emit(found)

    def _flush(self) -> int:
        """Flush all outboxes. Returns the number of messages that are still queued."""
        waiting = 0
        for outbox in self.outboxes.values():
            outbox.flush()
            waiting += outbox.backlog
        return waiting
