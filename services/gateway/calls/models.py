"""The handlers of ControlService for models: list, load, unload, name, watch."""

import asyncio
from collections.abc import Callable

from sluice.v1 import control_pb2

from sluice_server.engine.errors import Code, ServiceError, invalid, unsupported
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.adapters.loads import Answer
from sluice_server.services.gateway.calls.adapters import MAX_NAMED
from sluice_server.services.gateway.calls.described import model_message
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.gateway.contract.errors import draining
from sluice_server.services.gateway.models.asked import named_model, weights_of
from sluice_server.services.gateway.models.known import KnownModels
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.models.memory import LaneMemory
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.messages.work import LoadAdapter
from sluice_server.services.process.model_commands import NameModels, SleepLane, UnloadLane, WakeLane
from sluice_server.services.process.model_table import LaneEntry, LaneState

MAX_PAGE, DEFAULT_PAGE = 1000, 100
MAX_GRACE_S = 24 * 3600.0
UNLIMITED_S = 1e9  # for what is open, where no grace is given
MAX_FAILURE = 1024
DEEPEST = 2  # level of sleep
STATES = {
    LaneState.DRAINING: control_pb2.MODEL_STATE_UNLOADING,
    LaneState.FAILED: control_pb2.MODEL_STATE_FAILED,
    LaneState.DOZING: control_pb2.MODEL_STATE_SLEEPING,
    LaneState.NAPPING: control_pb2.MODEL_STATE_SLEEPING,
    LaneState.SLEEPING: control_pb2.MODEL_STATE_SLEEPING,
}


class ModelCalls:
    """The handlers of one gateway."""

    def __init__(self, models: Models[Lane], known: KnownModels) -> None:
        self._models = models
        self._known = known
        self._memory = LaneMemory()

    async def list_models(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        """ListModels: returns a page of the models, by id."""
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE
        if not 1 <= size <= MAX_PAGE:
            await refuse(context, invalid("page_size", f"{size} is not in [1, {MAX_PAGE}]"))
        after, ids = request.page_token, self._ids()
        if after and after not in ids:
            await refuse(context, invalid("page_token", "is not one that this server gave out"))
        left = [name for name in ids if name > after]
        await self._memory.refresh()
        token = left[size - 1] if len(left) > size else ""
        return control_pb2.ListModelsResponse(models=map(self._described, left[:size]), next_page_token=token)

    async def get(self, request: control_pb2.GetModelRequest, context: Context) -> control_pb2.GetModelResponse:
        """GetModel: returns the model of that id or alias; NOT_FOUND for any other name."""
        name = request.model
        try:
            if name not in self._ids():
                name = self._models.chosen_for(CALLER.get().tenant, name).id
        except ServiceError as error:
            await refuse(context, error)
        await self._memory.refresh()
        return control_pb2.GetModelResponse(model=self._described(name))

    async def watch(self, request: control_pb2.WatchModelsRequest, context: Context) -> None:
        """WatchModels: writes all models, and again whenever one changes."""
        while True:
            seen = self._known.news.number
            await self._memory.refresh()
            await context.write(control_pb2.WatchModelsResponse(models=map(self._described, self._ids())))
            await self._known.news.after(seen)

    async def load(self, request: control_pb2.LoadModelRequest, context: Context) -> control_pb2.LoadModelResponse:
        """LoadModel: answers when the model serves at this gateway and at the others."""
        try:
            self._check_stays()
            named = named_model(request, self._known.models_dir, self._known.declared)
            name = await self._known.ask(await self._known.loading_of(named))
            lane = await self._until_ready(name, request.model)
            await self._check_revision(lane, request)
            for adapter in request.adapters:
                await _load_adapter(lane, adapter)
        except ServiceError as error:
            await refuse(context, error)
            raise
        await self._memory.refresh()
        return control_pb2.LoadModelResponse(model=self._described(lane.id))

    async def unload(
        self, request: control_pb2.UnloadModelRequest, context: Context
    ) -> control_pb2.UnloadModelResponse:
        """UnloadModel: answers when what was open has ended, and its processes are asked to exit."""
        try:
            grace_s = to_seconds("grace", request.grace, MAX_GRACE_S, 0.0) if request.HasField("grace") else UNLIMITED_S
            name = await self._known.ask(UnloadLane(request.model, grace_s))
            await self._until(lambda: name not in self._known.table.lanes)
        except ServiceError as error:
            await refuse(context, error)
        return control_pb2.UnloadModelResponse()

    async def sleep(self, request: control_pb2.SleepModelRequest, context: Context) -> control_pb2.SleepModelResponse:
        """SleepModel: answers when what was open has ended, and its processes are asked to exit, or at level 1 have
        emptied their cache."""
        try:
            grace_s = to_seconds("grace", request.grace, MAX_GRACE_S, 0.0) if request.HasField("grace") else UNLIMITED_S
            level = request.level if request.HasField("level") else DEEPEST
            if not 1 <= level <= DEEPEST:
                raise invalid("level", f"{level} is not in [1, {DEEPEST}]", limit=DEEPEST)
            if level < DEEPEST:
                self._check_cache(request.model)
            name = await self._known.ask(SleepLane(request.model, grace_s, level))
            await self._until(lambda: not self._falls_asleep(name))
            if self._state(name) not in (LaneState.NAPPING, LaneState.SLEEPING, LaneState.DRAINING, None):
                raise _still_used(request.model)
        except ServiceError as error:
            await refuse(context, error)
        return control_pb2.SleepModelResponse()

    async def wake(self, request: control_pb2.WakeModelRequest, context: Context) -> control_pb2.WakeModelResponse:
        """WakeModel: answers when the model serves."""
        try:
            self._check_stays()
            name = await self._known.ask(WakeLane(request.model))
            lane = await self._until_ready(name, request.model)
        except ServiceError as error:
            await refuse(context, error)
            raise
        return control_pb2.WakeModelResponse(model=self._described(lane.id))

    def _check_stays(self) -> None:
        """Raises ServiceError while this gateway drains: no model serves here any more."""
        if self._models.books.leaving:
            raise draining()

    def _check_cache(self, model: str) -> None:
        """Raises ServiceError for a model that cannot sleep at level 1."""
        lane = self._models.of(model)
        report = None if lane is None else lane.loads.any_report
        if report is not None and report.computing.has_fixed_cache:
            text = "it is an encoder, on a GPU or of several ranks, so that its cache has a fixed size: use level 2"
            raise unsupported("level", text)

    def _falls_asleep(self, lane: str) -> bool:
        """Whether a lane is about to sleep."""
        entry = self._known.table.lanes.get(lane)
        is_emptying = entry is not None and entry.state is LaneState.NAPPING and not entry.is_empty
        return is_emptying or self._state(lane) is LaneState.DOZING

    def _state(self, lane: str) -> LaneState | None:
        entry = self._known.table.lanes.get(lane)
        return None if entry is None else entry.state

    async def set_alias(self, request: control_pb2.SetAliasRequest, context: Context) -> control_pb2.SetAliasResponse:
        """SetAlias: answers when this gateway follows it; the others do within a moment."""
        try:
            weights = weights_of(request)
            await self._known.ask(NameModels(request.alias, weights))
            await self._until(lambda: self._known.table.aliases.get(request.alias, {}) == weights)
        except ServiceError as error:
            await refuse(context, error)
        return control_pb2.SetAliasResponse()

    async def _until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            await self._known.news.after(self._known.news.number)

    async def _until_ready(self, name: str, model: str) -> Lane:
        """Waits until a lane serves. Raises ServiceError MODEL_FAILED if it is given up or unloaded, and DRAINING if
        this gateway begins to drain."""
        was_there = False
        while True:
            self._check_stays()
            table, lane = self._known.table, self._models.of(model)
            if name in table.given_up:
                raise _failed(model, table.given_up[name])
            entry = table.lanes.get(name)
            was_there = was_there or entry is not None
            if was_there and (entry is None or entry.state is LaneState.DRAINING):
                raise _failed(model, "it was unloaded meanwhile")
            if entry is not None and entry.state is LaneState.READY and lane is not None and lane.is_serving:
                return lane
            await self._known.news.after(self._known.news.number)

    async def _check_revision(self, lane: Lane, request: control_pb2.LoadModelRequest) -> None:
        """Raises ServiceError for a model of another revision than was expected; it is unloaded then."""
        served = lane.manager.settings.model.revision
        if request.HasField("expected_revision") and served != request.expected_revision:
            await self._known.ask(UnloadLane(request.model, 0.0))
            text = f"expected_revision: is {request.expected_revision[:64]!r}, and the files have {served!r}"
            raise ServiceError(Code.FAILED_PRECONDITION, "REVISION_CHANGED", text, field="expected_revision")

    def _ids(self) -> list[str]:
        """Returns the ids of the models that the caller's tenant may use."""
        models, tenant = self._models, CALLER.get().tenant
        hidden = {one.id for one in models if not models.allows(tenant, one)}
        closed = [name for name in models.facts if models.of(name) is None]
        hidden |= {name for name in closed if not models.books.allows_model(tenant, [name])}
        return sorted({*models.facts, *(one.id for one in models)} - hidden)

    def _described(self, model: str) -> control_pb2.Model:
        lane, fact = self._models.of(model), self._models.facts.get(model)
        made = control_pb2.Model(id=model, state=control_pb2.MODEL_STATE_LOADING)
        if lane is not None:
            state = control_pb2.MODEL_STATE_READY if lane.is_serving else control_pb2.MODEL_STATE_LOADING
            names = lane.named_adapters.names(CALLER.get().tenant)[:MAX_NAMED]
            made = model_message(lane.manager.settings, lane.loads.any_report, state, names)
            made.open_requests = lane.manager.num_open
            if fact is None or fact.state is not LaneState.SLEEPING:
                made.processes.extend(sorted(lane.processes))
            made.memory_bytes = self._memory.of(lane.processes)
        if fact is not None:
            self._add_facts(made, fact)
        return made

    def _add_facts(self, made: control_pb2.Model, fact: LaneEntry) -> None:
        made.state, made.sleep_level = STATES.get(fact.state, made.state), fact.sleep_level
        made.failure, made.pinned = fact.why.encode()[:MAX_FAILURE].decode(errors="ignore"), fact.pinned
        for alias, weights in sorted(self._models.aliases.items()):
            if fact.model in weights:
                made.aliases.add(alias=alias, weight=weights[fact.model])


async def _load_adapter(lane: Lane, name: str) -> None:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    lane.adapters.load(LoadAdapter(name, name), lambda found: None if answer.done() else answer.set_result(found))
    found = await answer
    if isinstance(found, ServiceError):
        raise found.with_traceback(None)


def _still_used(model: str) -> ServiceError:
    text = f"the model {model!r} serves on: it was asked for, by a request or WakeModel, before it slept"
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_IN_USE", text, field="model")


def _failed(model: str, why: str) -> ServiceError:
    text = f"the model {model!r} was not loaded: {why}"
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_FAILED", text, field="model")
