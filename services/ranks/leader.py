"""Rank 0's end of a group: the other ranks join it, hear its orders, and tell it how launches ended."""

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Container
from functools import partial

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, RankLost, ServiceError
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.parallel.messages import (
    Connected,
    Hello,
    Launched,
    Moved,
    Order,
    RankEnded,
    RankReady,
    Refused,
    Report,
    SaveBlocks,
    Saved,
    Told,
    Welcome,
)
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import Stages
from sluice_server.engine.parallel.sums import TimedSums, patience_s
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks.codec import ORDERS, REPORTS, MalformedMessage
from sluice_server.services.ranks.descriptors import SUFFIX, Offer, offered
from sluice_server.services.ranks.devices import connect_devices, take_device
from sluice_server.services.ranks.membership import check_equal, disagreement, hello_of, refusal
from sluice_server.services.ranks.memory import RankConnections, connect, new_memory
from sluice_server.services.ranks.network import connect_hosts
from sluice_server.services.ranks.rendezvous import Rendezvous
from sluice_server.services.ranks.settings import START_S, own_epoch, rank_table
from sluice_server.services.ranks.sockets import RankSockets, open_sockets, time_left
from sluice_server.version import VERSION

logger = logging.getLogger(__name__)

ASKED_S = 10.0  # between two log lines about ranks that are awaited
ATTEND_S = 1.0  # between two looks at them


def _nothing() -> None:
    """Does nothing while ranks are awaited: a supervisor looks after them."""


class RankGroup:
    """Implements `Workers` over sockets."""

    def __init__(
        self,
        sockets: RankSockets,
        own: Hello,
        shape: ParallelShape,
        num_here: int = 0,
        attend: Callable[[], None] = _nothing,
    ) -> None:
        """`num_here`: of its ranks, those on this host; 0: all. `attend` is called while ranks are awaited that have
        to load something; it may raise RankLost."""
        self.size = own.size
        self.num_here = num_here
        self.shape = shape
        self.step_s: Callable[[], float] = float  # returns the time of a usual step
        self.depth = shape.pipeline_size - 1
        self._attend = attend
        self._connections: RankConnections | None = None
        self._sockets = sockets
        self._own = own
        self._ready: list[RankReady] = []
        self._launched: defaultdict[int, dict[int, Launched]] = defaultdict(dict)  # by number and rank
        self._awaited = 1  # number of the launch whose end was awaited last
        self._moved: list[Moved] = []
        sockets.epoch = own.epoch

    @property
    def sums(self) -> TimedSums:
        """Implements `Workers.sums`, once memory is shared."""
        assert self._connections is not None
        return self._connections.sums

    @property
    def stages(self) -> Stages | None:
        """Implements `Workers.stages`, once memory is shared."""
        assert self._connections is not None
        return self._connections.stages

    def share_memory(self, offer: Offer) -> None:
        """Makes the memory of sums and stages, and passes it to all ranks."""
        files = new_memory(self.shape)
        offer.pass_on(files, self.size - 1)
        self._connections = connect(files, self.shape, START_S)

    def connect(self, make: Callable[[Rendezvous], RankConnections]) -> None:
        """Connects ranks that find one another by what they tell, once they have joined; `make` connects this one.
        Raises ServiceError and RankLost."""
        connected: set[int] = set()

        def note(report: Report) -> None:
            if isinstance(report, Told):
                rendezvous.note(report)
                self.send(report)
            elif isinstance(report, Connected):
                connected.add(report.rank)

        def receive() -> None:
            report = self._receive(ASKED_S)
            if report is not None:
                note(report)

        rendezvous = Rendezvous(self.send, receive)
        self._connections = make(rendezvous)
        self._await(note, lambda: self._missing(connected), "to connect with the others")

    def gather(self, sums: str = "") -> None:
        """Waits for all ranks, and welcomes them; they find the memory at `sums`. Raises ServiceError for one
        that cannot belong to this group, or that does not come."""
        joined: dict[int, Hello] = {}

        def join(report: Report) -> None:
            if isinstance(report, Hello):
                reason = refusal(self._own, report, joined)
                if reason:
                    self.send(Refused(reason))
                    raise disagreement(reason)
                joined[report.rank] = report

        self._await(join, lambda: self._missing(joined), "to join")
        self.send(Welcome(self._own.epoch, sums))

    def ready(self, layout: str) -> None:
        """Implements `Workers.ready`."""
        found: dict[int, RankReady] = {}

        def note(report: Report) -> None:
            if isinstance(report, RankReady):
                found[report.rank] = report

        self._await(note, lambda: self._missing(found), "to load its part of the model")
        self._ready = [found[rank] for rank in sorted(found)]
        check_equal("layout", layout, {one.rank: one.layout for one in self._ready})

    def check_revision(self, revision: str) -> None:
        """Raises ServiceError if a rank has read other files than rank 0, whose revision this is."""
        check_equal("model", revision, {one.rank: one.revision for one in self._ready})

    def send(self, order: Order) -> None:
        """Implements `Workers.send`: the order is encoded once."""
        self._sockets.send(ORDERS.encode(order))

    def look(self) -> None:
        """Implements `Workers.look`."""
        self._receive(0)

    def moved(self) -> list[Moved]:
        """Implements `Workers.moved`."""
        found, self._moved = self._moved, []
        return found

    def save(self, moves: list[Move], seconds: float) -> None:
        """Implements `Workers.save`."""
        self.send(SaveBlocks(moves, seconds))

    def saved(self, seconds: float) -> None:
        """Implements `Workers.saved`. What a rank has not saved is found missing later, so nothing is raised."""
        until_s, waited = time.monotonic() + seconds, set(range(1, self.size))
        with contextlib.suppress(RankLost):
            while waited and time_left(until_s):
                report = self._receive(time_left(until_s))
                if isinstance(report, Saved):
                    waited.discard(report.rank)
        if waited:
            logger.warning("rank %s did not save its part of the cache", ", ".join(map(str, sorted(waited))))

    def launched(self, num: int) -> list[Launched]:
        """Implements `Workers.launched`."""
        patient_s = patience_s(self.step_s())
        until_s = time.monotonic() + patient_s
        self._awaited = num
        while len(self._launched[num]) < self.size - 1:
            if self._receive(time_left(until_s)) is None and not time_left(until_s):
                missing = ", ".join(map(str, self._missing(self._launched[num])))
                raise RankLost(f"rank {missing} has not said for {patient_s:.1f} s how launch {num} ended: stuck")
        return list(self._launched.pop(num).values())

    def close(self) -> None:
        """Ends the connections; the other ranks end when they see it."""
        self._sockets.close()

    def _missing(self, found: Container[int]) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in found]

    def _await(self, note: Callable[[Report], None], missing: Callable[[], list[int]], what: str) -> None:
        until_s, asked_s = time.monotonic() + START_S, time.monotonic()
        while missing():
            self._attend()
            report = self._receive(min(time_left(until_s), ATTEND_S))
            if report is not None:
                note(report)
                continue
            names = ", ".join(map(str, missing()))
            if not time_left(until_s):
                text = f"rank {names} did not come {what} within {START_S:g} s: see its log, and --rank-peers"
                raise ServiceError(Code.UNAVAILABLE, "RANK_MISSING", text)
            if time.monotonic() - asked_s >= ASKED_S:
                asked_s = time.monotonic()
                logger.info("waiting for rank %s %s", names, what)

    def _receive(self, timeout_s: float) -> Report | None:
        """Returns a report of this start of the group; ends of launches and of transfers are kept until they are asked
        for. Raises RankLost when a rank ends."""
        frame = self._sockets.receive(timeout_s)
        if frame is None:
            return None
        try:
            report = REPORTS.decode(frame.data)
        except MalformedMessage as error:
            logger.warning("a message of a rank was dropped: %s", error)
            return None
        if frame.epoch != self._own.epoch and not isinstance(report, Hello):
            return None
        if isinstance(report, Moved):
            self._moved.append(report)
        if isinstance(report, Launched):
            self._note_launched(report)
        if isinstance(report, RankEnded):
            raise RankLost(f"rank {report.rank} has ended: {report.reason}")
        return report

    def _note_launched(self, report: Launched) -> None:
        """Keeps how a launch ended until it is awaited: other stages may be ahead. Raises RankLost for any other."""
        if not self._awaited <= report.num <= self._awaited + self.shape.pipeline_size:
            raise RankLost(f"rank {report.rank} is at launch {report.num}, rank 0 at {self._awaited}")
        self._launched[report.num][report.rank] = report


def open_group(
    engine: EngineConfig,
    service: ServiceConfig,
    process_id: str,
    configuration: str,
    attend: Callable[[], None] = _nothing,
) -> RankGroup:
    """Returns the group of which this process is rank 0, once all ranks have joined it. Raises ServiceError; `attend`
    is called while it waits."""
    table = rank_table(engine, service, process_id)
    device = take_device(engine, table)
    epoch = own_epoch(os.environ, table)
    own = hello_of(engine, 0, epoch, VERSION, configuration, service.rank_peers if table.is_networked else "")
    sockets = open_sockets(table.addresses, process_id, table.others, service.ring_keys)
    shape = shape_of(engine)
    group = RankGroup(sockets, own, shape, table.num_here, attend)
    try:
        if device.type != "cpu":
            group.gather()
            group.connect(partial(connect_devices, shape, device))
            return group
        if table.is_networked:
            group.gather()
            group.connect(partial(connect_hosts, shape, table, sockets, sum_dtype=engine.sum_dtype))
            return group
        with offered(table.addresses[process_id].removeprefix("ipc://") + SUFFIX) as offer:
            group.gather(offer.path)
            group.share_memory(offer)
    except BaseException:
        group.close()
        raise
    return group
