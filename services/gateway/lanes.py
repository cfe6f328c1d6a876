"""The lanes of a gateway's process: opened, closed and named as the table of models says.

Under a supervisor the table is a file in the run directory, which is looked at when the supervisor says so, and again
and again. A gateway that runs alone has one lane, that of its settings.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Set
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.lane_reports import LaneReports
from sluice_server.services.gateway.models.lane import Lane, Ring
from sluice_server.services.gateway.opening import lane_settings_of, model_of, read_model, settings_of
from sluice_server.services.messages.messages import Envelope, KeepTrace, Message
from sluice_server.services.process.asking import ask
from sluice_server.services.process.joining import Common, join, read_files
from sluice_server.services.process.lane_ring import address_of, lane_of, lane_settings
from sluice_server.services.process.left_files import remove_inbox
from sluice_server.services.process.model_commands import Command, LoadLane
from sluice_server.services.process.model_table import (
    FILE,
    FIRST,
    UNPLANNED,
    LaneEntry,
    LaneState,
    ModelTable,
    prefix_of,
    read_table,
)
from sluice_server.services.process.models_file import NamedModel, read_models
from sluice_server.services.process.process import Process
from sluice_server.services.process.supervised import SUPERVISOR_PID, say_engines
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.transport import Transport

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at the table, without a word of the supervisor
LAST_WORDS_S = 2.0  # that the readers of what an unloaded model had open get to tell their clients


class GatewayLanes:
    """The lanes of one process."""

    def __init__(self, gateway: Gateway, engine: EngineConfig, service: ServiceConfig, common: Common) -> None:
        """Raises ServiceError for a table that cannot be read."""
        self._gateway = gateway
        self._engine = engine
        self._service = service
        self._common = common
        self._front = settings_of(engine, service, common.process_id)
        self._directory = Path(service.heartbeat_dir)
        self._table = _table_of(service)
        self._processes: dict[str, Process] = {}
        self._transport = Transport()
        self._transport.open()  # until `leave`
        self._looking = asyncio.Lock()
        self._is_told_to_look = asyncio.Event()
        self._reports = LaneReports(gateway, service, common.process_id, self._table)
        self.news = self._reports.news
        gateway.on_published, gateway.known = self._reports.tell, self

    @property
    def table(self) -> ModelTable:
        """The table as it was last read."""
        return self._table.value

    @property
    def rings(self) -> list[RingLoop]:
        """The rings that this process is in."""
        return [process.ring for process in list(self._processes.values())]

    async def ask(self, command: Command) -> str:
        """Has the supervisor carry out a command; returns the lane that it is about. Raises ServiceError."""
        if not self._table.is_followed:
            raise unsupported("models", "models are loaded under a supervisor only: start the service without --role")
        lane = await ask(self._directory, command)
        await self._look()
        return lane

    async def loading_of(self, named: NamedModel) -> LoadLane:
        """Returns the command that loads a model, with the memory that it may take. Raises ServiceError naming what is
        wrong with its files or settings."""
        return await asyncio.to_thread(self._loading_of, named)

    def _loading_of(self, named: NamedModel) -> LoadLane:
        # Imported here, on a thread: most gateways never load another model.
        from sluice_server.services.checks.models import checked_entry
        from sluice_server.services.checks.planned import with_plans

        entry = checked_entry(self._engine, self._service, named)
        first = self.table.lanes.get(FIRST) if not self._service.models else None
        planned, *beside = with_plans(self._engine, self._service, [entry] if first is None else [entry, first])
        return LoadLane(planned, beside[0].planned if beside else UNPLANNED)

    def declared(self, model: str) -> NamedModel | None:
        """Returns what the file of models says of one. Raises ServiceError for a file that cannot be used."""
        return read_models(Path(self._service.models)).models.get(model) if self._service.models else None

    @property
    def models_dir(self) -> str:
        """The directory below which models are found; "" for none."""
        return self._service.models_dir

    def keep_trace(self, envelope: Envelope) -> None:
        """Has the processes of a request's ring keep its trace."""
        lane = self._gateway.models.of(envelope.model)
        if lane is not None:
            self._processes[lane.name].ring.emit(KeepTrace(envelope))

    def lost(self, names: Set[str], *, planned: bool = False) -> None:
        """Handles the loss of these processes; without names, of an unknown one."""
        for lane in self._gateway.models:
            own = frozenset(name for name in names if lane_of(name) == lane.name)
            if own or not names:
                lane.lost(own, planned=planned)

    async def open_first(self) -> None:
        """Opens the lanes of the table. Raises ServiceError if the only one cannot be opened."""
        for name, entry in self.table.lanes.items():
            try:
                await self._open(name, entry)
            except ServiceError as error:
                if not self._service.models:
                    raise
                logger.error("the model %s cannot be served: %s", entry.model, error.message)
        self._name()

    async def follow(self) -> None:
        """Follows the table until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_told_to_look.wait()
            self._is_told_to_look.clear()
            await self._look()

    def look_now(self) -> None:
        """Has the table looked at without waiting for the next time."""
        self._is_told_to_look.set()

    async def leave(self) -> None:
        """Leaves all rings."""
        for process in self._processes.values():
            await process.leave()
        self._transport.close()

    async def _look(self) -> None:
        """Does what the table says, if it has changed."""
        async with self._looking:
            if self._table.refresh():
                await self._change()

    async def _change(self) -> None:
        lanes = self.table.lanes
        for name in self._processes.keys() - lanes.keys():
            await self._close(name)
        for name, entry in lanes.items():
            if name not in self._processes:
                try:
                    await self._open(name, entry)
                except ServiceError as error:
                    logger.error("the model %s cannot be served: %s", entry.model, error.message)
        self._name()
        self.news.tell()
        self._gateway.nudge()

    def _name(self) -> None:
        """Makes the names of the table those by which requests choose models."""
        models, table = self._gateway.models, self.table
        models.default, models.aliases = table.default, table.aliases
        opened = self._gateway.lanes
        models.facts = {
            opened[name].id if name in opened else entry.model: entry for name, entry in table.lanes.items()
        }
        for name, lane in opened.items():
            entry = table.lanes[name]
            lane.is_leaving, lane.leaves = entry.state is LaneState.DRAINING, entry.leaves
            lane.answer_to(frozenset(alias for alias, weights in table.aliases.items() if entry.model in weights))
            if name != FIRST or self._service.models:
                lane.waiting.follow(entry)

    async def _open(self, name: str, entry: LaneEntry) -> None:
        """Joins the ring of a lane. Raises ServiceError."""
        engine, service = self._engine, self._service
        if name != FIRST or service.models:
            inbox = address_of(self._directory, f"{prefix_of(name)}{self._common.process_id}")
            engine, service = lane_settings(engine, service, self._directory, name, entry)
            service = dataclasses.replace(service, inbox=inbox)
        files = await asyncio.to_thread(read_files, engine, service, with_weights=False)
        model = await asyncio.to_thread(model_of, service.served_model_name, files)
        process = join(engine, service, files, self._common, self._transport)
        settings = lane_settings_of(self._front, process, model)
        ring = Ring(
            lambda message: self._emit(name, message),
            lambda: process.ring.inbox.counts["lost"],
            lambda revision: read_model(process, revision),
        )
        lane = self._gateway.open(name, settings, ring)
        self._processes[name] = process
        if name == FIRST and not self._service.models:
            self._be_only(process, lane)
        try:
            process.start(lane)
        except ServiceError:
            await self._close(name)
            raise

    def _emit(self, name: str, message: Message) -> None:
        """Sends a message into the ring of a lane; what comes once it is closed is of no use to anyone."""
        process = self._processes.get(name)
        if process is not None:
            process.ring.emit(message)

    def _be_only(self, process: Process, lane: Lane) -> None:
        """Tells the supervisor of the model of `--model`, without which the service does not serve, and follows its
        engines, which join and leave."""
        name = process.ring.process_id
        lane.on_serving = self._reports.say_serving
        lane.on_engines = lambda serving, drained: say_engines(name, serving, drained)
        lane.change_engines(process.engines.value)  # some may be draining
        process.on_engines.append(lane.change_engines)

    async def _close(self, name: str) -> None:
        """Ends what a lane has open, and leaves its ring."""
        lane, process = self._gateway.lanes[name], self._processes.pop(name)
        lane.is_leaving = True
        why = self.table.given_up.get(name)
        lane.end(unloaded(lane.id) if why is None else not_loaded(lane.id, why))
        await lane.emptied(LAST_WORDS_S)
        self._gateway.close(name)
        await process.leave()
        remove_inbox(process.config.inbox)


def unloaded(model: str) -> ServiceError:
    """Returns the error of what is open when its model is unloaded."""
    text = f"model: {model!r} was unloaded, and the time that its requests had has passed"
    return ServiceError(Code.ABORTED, "MODEL_UNLOADED", text, field="model")


def not_loaded(model: str, why: str) -> ServiceError:
    """Returns the error of what waits for a model that could not be loaded."""
    text = f"model {model!r} could not be loaded: {why}"
    return ServiceError(Code.UNAVAILABLE, "MODEL_UNAVAILABLE", text, details={"model": model})


def _table_of(service: ServiceConfig) -> WatchedFile[ModelTable]:
    """Returns the table of the supervisor; without one, that of the model of the settings."""
    directory = Path(service.heartbeat_dir)
    if SUPERVISOR_PID in os.environ and service.heartbeat_dir and (directory / FILE).exists():
        return WatchedFile((directory / FILE,), lambda: read_table(directory))
    entry = LaneEntry(service.served_model_name, service.model, service.revision, state=LaneState.READY, pinned=True)
    return WatchedFile((), lambda: ModelTable({FIRST: entry}))
