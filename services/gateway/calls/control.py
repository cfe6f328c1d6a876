"""The implemented handlers of ControlService: models, server info, load, drain."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.engine.executor.computing import UNKNOWN
from sluice_server.engine.request import Limits
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.cache_events import CacheEvents
from sluice_server.services.gateway.calls.adapters import MAX_NAMED, AdapterHandlers
from sluice_server.services.gateway.calls.artifacts import Artifacts
from sluice_server.services.gateway.calls.load import Loads
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.contract.durations import to_duration, to_seconds
from sluice_server.services.gateway.contract.embedding import embeds
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.contract.fields import BUILT, FEATURE_FIELDS
from sluice_server.services.gateway.contract.parameters import model_defaults
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import ModelInfo
from sluice_server.services.media.processor import FILE_LIMITS

SCHEMA_REVISION = 18
MAX_PAGE = 1000
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0  # intervals of WatchLoad
MAX_GRACE_S = 24 * 3600.0
DRAIN_INTERVAL_S = 0.25  # between two reports of Drain
FEATURES = (
    control_pb2.FEATURE_STREAM,
    control_pb2.FEATURE_CONVERSE,
    control_pb2.FEATURE_TOKENIZE,
    control_pb2.FEATURE_EMBED,
    control_pb2.FEATURE_REASONING,
    control_pb2.FEATURE_WATCH_LOAD,
    control_pb2.FEATURE_DRAIN,
    *(feature for feature, path in FEATURE_FIELDS if path in BUILT),
)


def features(limits: Limits, model: ModelInfo) -> "list[control_pb2.Feature.ValueType]":
    """Returns the features of this server; speculation only where the engine can draft, adapters where it takes them,
    vectors and images where the model has them."""
    has = {
        control_pb2.FEATURE_SPECULATION: limits.max_draft_tokens > 0,
        control_pb2.FEATURE_EMBED: embeds(model),
        control_pb2.FEATURE_IMAGES: limits.images is not None,
        control_pb2.FEATURE_ADAPTERS: limits.max_adapters > 0,
    }
    return [feature for feature in FEATURES if has.get(feature, True)]


def _image_limits(limits: Limits) -> dict[str, int]:
    """Returns the limits of images; none for a server that takes none."""
    if limits.images is None:
        return {}
    return {
        "max_images": limits.images.max_images,
        "max_image_bytes": FILE_LIMITS.max_bytes,
        "max_image_pixels": FILE_LIMITS.max_pixels,
        "max_image_tokens": limits.images.most_tokens,
    }


def tasks(model: ModelInfo) -> "list[control_pb2.ModelTask.ValueType]":
    """Returns what a model can be asked for."""
    num_labels = 0 if model.labels is None else len(model.labels.names)
    has = {
        control_pb2.MODEL_TASK_GENERATE: model.generates,
        control_pb2.MODEL_TASK_EMBED: embeds(model),
        control_pb2.MODEL_TASK_CLASSIFY: model.labels is not None and model.labels.words is None,
        control_pb2.MODEL_TASK_RERANK: num_labels == 1,
    }
    return [task for task, is_there in has.items() if is_there]


class Control:
    """The handlers. `drain` makes the gateway refuse new requests and ends the running ones after so many seconds."""

    def __init__(
        self,
        manager: RequestManager,
        drain: Callable[[float], Coroutine[Any, Any, None]],
        events: CacheEvents,
        adapters: AdapterHandlers,
    ) -> None:
        self.adapters = adapters
        self.loads = Loads(manager, adapters.of_engine)
        self.artifacts = Artifacts(manager, events)
        self._manager = manager
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._start_time = Timestamp(seconds=int(time.time()))

    async def list_models(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        """ListModels: returns the one model, on one page."""
        size = request.page_size if request.HasField("page_size") else 1
        if not 1 <= size <= MAX_PAGE:
            await refuse(context, invalid("page_size", f"{size} is not in [1, {MAX_PAGE}]"))
        if request.page_token:
            await refuse(context, invalid("page_token", "is not one that this server gave out"))
        return control_pb2.ListModelsResponse(models=[self._model(CALLER.get().tenant)])

    async def get_model(self, request: control_pb2.GetModelRequest, context: Context) -> control_pb2.GetModelResponse:
        """GetModel: returns the model; NOT_FOUND for any other name."""
        known = self._manager.settings.model.id
        if request.model != known:
            await refuse(context, not_found("model", request.model, f"this server serves {known!r}"))
        return control_pb2.GetModelResponse(model=self._model(CALLER.get().tenant))

    async def get_server_info(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """GetServerInfo: returns version, limits, features, and how each engine that has reported computes."""
        settings = self._manager.settings
        return control_pb2.GetServerInfoResponse(
            version=settings.version,
            schema_revision=SCHEMA_REVISION,
            gateway_id=settings.gateway_id,
            start_time=self._start_time,
            limits=self._limits(),
            features=features(settings.limits, settings.model),
            engines=self.loads.engines(),
        )

    async def get_load(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.GetLoadResponse:
        """GetLoad: returns the load of this gateway, and that of each engine as last reported."""
        return control_pb2.GetLoadResponse(load=self.loads.now())

    async def watch_load(self, request: control_pb2.WatchLoadRequest, context: Context) -> None:
        """WatchLoad: sends the load every interval until the client ends the call."""
        interval_s = 1.0
        try:
            if request.HasField("interval"):
                interval_s = to_seconds("interval", request.interval, MAX_INTERVAL_S, MIN_INTERVAL_S)
        except ServiceError as error:
            await refuse(context, error)
        while True:
            await context.write(control_pb2.WatchLoadResponse(load=self.loads.now()))
            await asyncio.sleep(interval_s)

    async def drain(self, request: control_pb2.DrainRequest, context: Context) -> None:
        """Drain: begins to drain and reports progress. Draining goes on if the client ends the call."""
        grace_s = self._manager.settings.grace_s
        try:
            if request.HasField("grace"):
                grace_s = to_seconds("grace", request.grace, MAX_GRACE_S, 0.0)
        except ServiceError as error:
            await refuse(context, error)
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="drain")
        while (num_open := self._manager.num_open) or not self._draining.done():
            await context.write(control_pb2.DrainResponse(open_requests=num_open))
            await asyncio.wait([self._draining], timeout=DRAIN_INTERVAL_S)
        await context.write(control_pb2.DrainResponse(drained=True))

    def _model(self, tenant: str) -> control_pb2.Model:
        model = self._manager.settings.model
        refusal: ServiceError | None = self._manager.refusal
        report = self.loads.any_report
        how = report.computing if report else UNKNOWN
        return control_pb2.Model(
            id=model.id,
            revision=model.revision,
            architecture=model.architecture,
            dtype=how.dtype,
            parameter_count=how.num_parameters,
            quantization=how.quantization,
            kv_cache_dtype=how.cache_dtype,
            kernels=how.kernels,
            context_length=model.context_length,
            vocab_size=self._manager.settings.limits.vocab_size,
            eos_token_ids=model.eos_ids,
            defaults=model_defaults(model.defaults),
            create_time=Timestamp(seconds=model.created_s) if model.created_s else None,
            state=control_pb2.MODEL_STATE_READY if refusal is None else control_pb2.MODEL_STATE_LOADING,
            tasks=tasks(model),
            embedding_width=model.vector_width if embeds(model) else 0,
            adapters=self.adapters.names(tenant)[:MAX_NAMED],
        )

    def _limits(self) -> control_pb2.ServerLimits:
        settings, limits = self._manager.settings, self._manager.settings.limits
        return control_pb2.ServerLimits(
            max_receive_message_bytes=settings.max_receive_bytes,
            max_send_message_bytes=settings.max_send_bytes,
            max_prompt_bytes=limits.max_prompt_bytes,
            max_logprobs=limits.max_logprobs,
            max_stop_strings=limits.max_stop_strings,
            max_stop_bytes=limits.max_stop_bytes,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_priority=limits.max_priority,
            max_temperature=limits.max_temperature,
            max_open_requests=settings.max_open_requests,
            max_reserved_tokens=settings.max_reserved_tokens,
            max_chat_messages=settings.max_chat_messages,
            stall_timeout=to_duration(settings.stall_timeout_s),
            max_stream_generations=settings.max_stream_generations,
            max_stream_frames_per_second=settings.max_stream_frames_per_s,
            max_credit=limits.max_credit,
            **_image_limits(limits),
            max_adapters=limits.max_adapters,
        )
