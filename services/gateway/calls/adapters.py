"""The handlers of ControlService for adapters: load, unload, list."""

import asyncio
from typing import Protocol

from sluice.v1 import control_pb2

from sluice_server.engine.checks import check_takes_adapters
from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.adapters.loads import MAX_PATH_BYTES, Adapters, Answer, check_name, unknown
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.gateway.models.registry import Models, Served
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.messages.details import AdapterState
from sluice_server.services.messages.work import LoadAdapter

MAX_PAGE, DEFAULT_PAGE = 1000, 100
MAX_GRACE_S = 24 * 3600.0
MAX_NAMED = 1024  # adapters in the description of a model
DIGEST_HEX = 64

Residency = control_pb2.AdapterResidency


class AdapterHandlers:
    """The handlers of the adapters of one model."""

    def __init__(self, manager: RequestManager, adapters: Adapters) -> None:
        self._manager = manager
        self._adapters = adapters

    def names(self, tenant: str) -> list[str]:
        """Returns the names of the adapters that a tenant may use."""
        return [name for name in self._adapters.registry.names() if self._adapters.allows(tenant, name)]

    def is_known(self, name: str) -> bool:
        """Whether the name has an adapter, or is about to."""
        return self._adapters.is_known(name)

    def states(self, tenant: str) -> list[AdapterState]:
        """Returns the adapters that a tenant may use, by name."""
        return [one for name in self.names(tenant) if (one := self._adapters.registry.get(name)) is not None]

    def of_engine(self, engine: str) -> list[control_pb2.AdapterLoad]:
        """Returns where the adapters of an engine are."""
        found = self._adapters.registry.of_engine(engine)
        return [control_pb2.AdapterLoad(name=one.name, residency=_where(one.in_slot, one.in_host)) for one in found]

    async def load(self, request: control_pb2.LoadAdapterRequest, context: Context) -> control_pb2.LoadAdapterResponse:
        """LoadAdapter: answers when every engine that serves has the adapter."""
        try:
            work = self._work(request)
            self._check_serving()
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._adapters.load(work, lambda found: _resolve(answer, found))
            found = await answer
            if isinstance(found, ServiceError):
                raise found.with_traceback(None)
        except ServiceError as error:
            await refuse(context, error)
            raise
        assert isinstance(found, AdapterState)
        return control_pb2.LoadAdapterResponse(adapter=self.described(found))

    async def unload(
        self, request: control_pb2.UnloadAdapterRequest, context: Context
    ) -> control_pb2.UnloadAdapterResponse:
        """UnloadAdapter: answers when every engine that serves has forgotten the name."""
        try:
            check_takes_adapters(self._manager.settings.limits)
            self._check_serving()
            grace_s = to_seconds("grace", request.grace, MAX_GRACE_S, 0.0) if request.HasField("grace") else None
            if not self._adapters.is_known(request.adapter):
                raise unknown(request.adapter, self._manager.settings.model.id)
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            state = self._adapters.drop(request.adapter, lambda found: _resolve(answer, found))
            if state is not None and grace_s is not None:
                loop, error = asyncio.get_running_loop(), _unloaded(request.adapter)
                loop.call_later(grace_s, self._adapters.fail, state.digest, error)
            found = await answer
            if isinstance(found, ServiceError):
                raise found.with_traceback(None)
        except ServiceError as error:
            await refuse(context, error)
            raise
        return control_pb2.UnloadAdapterResponse()

    def _work(self, request: control_pb2.LoadAdapterRequest) -> LoadAdapter:
        settings = self._manager.settings
        check_takes_adapters(settings.limits)
        check_name(request.adapter, settings.model.id)
        path = request.path if request.HasField("path") else request.adapter
        size = len(path.encode())
        if not 1 <= size <= MAX_PATH_BYTES:
            raise invalid("path", f"has {size} bytes; 1 to {MAX_PATH_BYTES} are allowed", limit=MAX_PATH_BYTES)
        if request.HasField("base_model") and request.base_model != settings.model.id:
            raise _other_base(request.base_model, settings.model.id)
        return LoadAdapter(request.adapter, path, _digest(request.expected_digest), request.pinned)

    def _check_serving(self) -> None:
        """Raises ServiceError while no engine serves."""
        if not self._manager.engines.is_any_serving and self._manager.refusal is not None:
            raise self._manager.refusal.with_traceback(None)

    def described(self, state: AdapterState) -> control_pb2.Adapter:
        """Returns the description of an adapter."""
        nearest = self._adapters.registry.nearest(state.name)
        return control_pb2.Adapter(
            name=state.name,
            base_model=self._manager.settings.model.id,
            digest=state.digest.hex(),
            rank=state.rank,
            modules=state.modules,
            bytes=state.num_bytes,
            residency=_where(nearest[0] or state.in_slot, nearest[1] or state.in_host),
            pinned=state.is_pinned,
            open_requests=self._adapters.num_open(state.digest),
            path=state.path,
        )


class Adapted(Served, Protocol):
    """A model, and the handlers of its adapters."""

    @property
    def named_adapters(self) -> AdapterHandlers:
        """The handlers."""


class AdapterCalls:
    """The handlers of one gateway."""

    def __init__(self, models: Models[Adapted]) -> None:
        self._models = models

    async def load(self, request: control_pb2.LoadAdapterRequest, context: Context) -> control_pb2.LoadAdapterResponse:
        """LoadAdapter: loads into the engines of `base_model`."""
        base = self._models.of(request.base_model)
        return await (base or await self._first(context)).named_adapters.load(request, context)

    async def unload(
        self, request: control_pb2.UnloadAdapterRequest, context: Context
    ) -> control_pb2.UnloadAdapterResponse:
        """UnloadAdapter: unloads from the engines of the model that has it."""
        base = next((one for one in self._models if one.named_adapters.is_known(request.adapter)), None)
        return await (base or await self._first(context)).named_adapters.unload(request, context)

    async def list(
        self, request: control_pb2.ListAdaptersRequest, context: Context
    ) -> control_pb2.ListAdaptersResponse:
        """ListAdapters: a page of the adapters that the caller's tenant may use, of all models. Those of one name are
        on one page, where it is large enough."""
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE
        if not 1 <= size <= MAX_PAGE:
            await refuse(context, invalid("page_size", f"{size} is not in [1, {MAX_PAGE}]"))
        tenant, after = CALLER.get().tenant, request.page_token
        pairs = [(state, one.named_adapters) for one in self._models for state in one.named_adapters.states(tenant)]
        left = sorted((pair for pair in pairs if pair[0].name > after), key=lambda pair: pair[0].name)
        end = size
        while 1 < end < len(left) and left[end][0].name == left[end - 1][0].name:
            end -= 1
        token = left[end - 1][0].name if len(left) > end else ""
        found = [handlers.described(state) for state, handlers in left[:end]]
        return control_pb2.ListAdaptersResponse(adapters=found, next_page_token=token)

    async def _first(self, context: Context) -> Adapted:
        try:
            return self._models.first
        except ServiceError as error:
            await refuse(context, error)
            raise


def _where(in_slot: bool, in_host: bool) -> "Residency.ValueType":  # of one adapter
    if in_slot:
        return Residency.ADAPTER_RESIDENCY_DEVICE
    return Residency.ADAPTER_RESIDENCY_HOST if in_host else Residency.ADAPTER_RESIDENCY_DISK


def _resolve(answer: "asyncio.Future[Answer]", found: Answer) -> None:
    if not answer.done():
        answer.set_result(found)


def _digest(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b"?"
    if (text and len(text) != DIGEST_HEX) or found == b"?":
        raise invalid("expected_digest", f"is not {DIGEST_HEX} hex digits: send the digest that Adapter has")
    return found


def _other_base(asked: str, served: str) -> ServiceError:
    text = f"base_model: the adapter is for {asked[:64]!r}; this server serves {served!r}"
    details = {"actual": asked[:64], "limit": served}
    return ServiceError(Code.FAILED_PRECONDITION, "ADAPTER_INVALID", text, field="base_model", details=details)


def _unloaded(name: str) -> ServiceError:
    text = f"adapter: {name!r} was unloaded, and the time that its generations had has passed"
    return ServiceError(Code.ABORTED, "ADAPTER_UNLOADED", text, field="adapter")
