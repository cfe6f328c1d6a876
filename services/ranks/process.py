"""The process of a rank other than 0: it joins its group, loads its part of the model and carries out orders.

It ends with its group. It has no role in the ring: it takes no requests and samples nothing.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import setproctitle

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import RankLost
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.parallel.build import RankPart, build_rank
from sluice_server.engine.parallel.messages import (
    Allocate,
    Connected,
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
from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.engine.worker.host.slices import LONG_S, take_turns_of
from sluice_server.services.checkpoint.adapter_hub import AdapterHub
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from sluice_server.services.config import ServiceConfig
from sluice_server.services.engine.naming import Naming
from sluice_server.services.process.heartbeat import BEAT_S, Heartbeat
from sluice_server.services.process.roles import open_heart
from sluice_server.services.process.supervised import die_with_supervisor
from sluice_server.services.ranks.codec import ORDERS, REPORTS
from sluice_server.services.ranks.descriptors import receive
from sluice_server.services.ranks.devices import connect_devices, take_device
from sluice_server.services.ranks.membership import disagreement, hello_of
from sluice_server.services.ranks.memory import RankConnections, connect
from sluice_server.services.ranks.network import connect_hosts
from sluice_server.services.ranks.rendezvous import Rendezvous
from sluice_server.services.ranks.settings import START_S, RankTable, config_of_rank, epoch_of, rank_table
from sluice_server.services.ranks.sockets import RankSockets, open_sockets
from sluice_server.services.ranks.stages_sockets import next_rank
from sluice_server.services.ring.loop import EXIT_BROKEN
from sluice_server.services.telemetry import logs
from sluice_server.version import VERSION

logger = logging.getLogger(__name__)

DISK_S = 0.005  # between looks at transfers with the disk
PATIENT_S = 3.0  # for which rank 0 may be busy before it lets ranks save


class RankProcess:
    """One rank's connection to rank 0, and its heartbeat."""

    def __init__(self, rank: int, sockets: RankSockets, heart: Heartbeat) -> None:
        self.rank = rank
        self.sockets = sockets
        self._heart = heart
        self._step_s = 0.0  # mean of recent steps
        self._is_loaded = False

    def beat(self) -> None:
        """Writes a heartbeat; none before the rank computes, as loading a model may take longer than silence may."""
        if self._is_loaded:
            self._heart.beat(self._step_s)

    def tell(self, report: Report) -> None:
        """Sends a report to rank 0."""
        self.sockets.send(REPORTS.encode(report))

    def orders(self, tell_moved: Callable[[], bool] = bool) -> Iterator[Order]:
        """Yields the orders of rank 0, with a heartbeat while there is none. Raises RankLost when rank 0 has ended,
        and ServiceError when it refuses this rank. `tell_moved` returns whether transfers with the disk go on."""
        while True:
            frame = self.sockets.receive(DISK_S if tell_moved() else BEAT_S)
            self.beat()
            if frame is None:
                continue
            order = ORDERS.decode(frame.data)
            if isinstance(order, Refused):
                raise disagreement(order.reason)
            if isinstance(order, Welcome):
                self.sockets.epoch = order.epoch
            elif frame.epoch != self.sockets.epoch:
                raise RankLost(f"rank 0 is at start {frame.epoch} of the group, this rank at {self.sockets.epoch}")
            yield order

    def connect(self, make: Callable[[Rendezvous], RankConnections]) -> RankConnections:
        """Connects this rank with others, which it finds by what they tell; `make` connects it. Raises RankLost."""
        orders = self.orders()

        def receive() -> None:
            order = next(orders)
            assert isinstance(order, Told), "rank 0 orders nothing before all ranks are connected"
            rendezvous.note(order)

        rendezvous = Rendezvous(self.tell, receive)
        found = make(rendezvous)
        self.tell(Connected(self.rank))
        return found

    def compute(self, worker: RankWorker) -> None:
        """Carries out orders until the group ends."""
        self._is_loaded = True
        self.beat()

        def tell_moved() -> bool:
            ended = worker.moved()
            if ended:
                self.tell(Moved(self.rank, ended))
            return worker.is_moving

        for order in self.orders(tell_moved):
            ended = worker.carry_out(order)
            if isinstance(order, SaveBlocks):
                self.tell(Saved(self.rank))
            if ended is not None:
                self._step_s = worker.step_s
                self.tell(ended)


def run_worker(engine: EngineConfig, service: ServiceConfig, process_id: str) -> int:
    """Runs one rank until its group ends or it is asked to stop. Returns the exit status. Raises ServiceError for what
    cannot be computed, and RankLost when rank 0 has ended."""
    setproctitle.setproctitle(f"sluice: {process_id}")
    logs.configure(service.log_level, service.log_format, process_id)
    die_with_supervisor()
    take_turns_of(LONG_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if engine.disk_cache_dir:  # rank 0 is asked to end at the same time, and lets all save their parts of the cache
        signal.signal(signal.SIGTERM, partial(_leave_later, engine.disk_cache_save_s + PATIENT_S))
        signal.signal(signal.SIGALRM, _leave)
    table = rank_table(engine, service, process_id)
    heart = open_heart(service, process_id)
    shape = shape_of(engine).of_member(table.rank)
    behind = next_rank(shape, table.ids) if table.is_networked else ""
    sockets = open_sockets(table.addresses, process_id, (table.leader,), service.ring_keys, behind)
    process = RankProcess(table.rank, sockets, heart)
    try:
        with _told(process):
            _work(process, engine, service, table, shape)
    except (RankLost, SumsBroken) as error:
        if signal.getitimer(signal.ITIMER_REAL)[0] > 0:  # asked to end, as rank 0 was
            return 0
        logger.error("this rank ends with its group: %s", error)
        raise SystemExit(EXIT_BROKEN) from error
    finally:
        sockets.close()
        heart.close()
    return 0


def _work(
    process: RankProcess, engine: EngineConfig, service: ServiceConfig, table: RankTable, shape: ParallelShape
) -> None:
    device = take_device(engine, table)
    contents = CheckpointFiles(resolve_model(service.model, service.revision), remembered(), with_weights=True)
    plugins = find_plugins(engine.plugins)
    model = read_served(contents.directory, plugins.models)
    limits = limits_of(engine, model, service.max_prompt_bytes, plugins)
    orders = process.orders()
    epoch, peers = (0, service.rank_peers) if table.is_networked else (epoch_of(os.environ), "")
    process.tell(hello_of(engine, table.rank, epoch, VERSION, contents.configuration, peers))
    welcome = next(orders)
    assert isinstance(welcome, Welcome), "rank 0 welcomes a rank before it orders anything else"
    with Naming(contents, None) as naming:
        if device.type != "cpu":
            connections = process.connect(partial(connect_devices, shape, device))
        elif table.is_networked:
            dtype = engine.sum_dtype
            connections = process.connect(partial(connect_hosts, shape, table, process.sockets, sum_dtype=dtype))
        else:
            connections = connect(receive(welcome.sums), shape, START_S)
        part = RankPart(
            config_of_rank(engine, table.num_here, table.rank), model, contents.directory, limits, shape, *connections
        )

        def ready(layout: str) -> None:
            process.tell(RankReady(table.rank, layout, naming.check()))

        def sizes() -> Allocate:
            order = next(orders)
            while isinstance(order, Told):  # to ranks that are not connected yet
                order = next(orders)
            assert isinstance(order, Allocate), "a rank that is ready gets the size of its cache next"
            return order

        worker = build_rank(part, ready, sizes)
        if worker.adapters is not None and engine.adapter_hub:
            worker.adapters.loader.sources.fetch = AdapterHub(engine.adapter_hub).fetch
    worker.watch(_at_most_every(BEAT_S / 2, process.beat))
    logger.info("rank %d of %d computes", table.rank, engine.num_ranks)
    with contextlib.closing(worker):
        process.compute(worker)


@contextlib.contextmanager
def _told(process: RankProcess) -> Iterator[None]:
    """Tells rank 0 why this rank ends, if an error ends the block."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RankLost):
            with contextlib.suppress(RankLost):
                process.tell(RankEnded(process.rank, " ".join(str(error).split()) or repr(error)))
        raise


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _leave_later(seconds: float, number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _at_most_every(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call`, but at most once in `seconds`."""
    last_s = time.monotonic()

    def called() -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= seconds:
            last_s = now_s
            call()

    return called
