"""The handlers of ControlService that are built: models, server info, load. Knows only the latest reports."""

import dataclasses
import time

from google.protobuf.timestamp_pb2 import Timestamp
from sluice.v1 import control_pb2, types_pb2

from engine.errors import ServiceError, invalid
from services.gateway.answers import duration
from services.gateway.calls import Context
from services.gateway.contract import BUILT, FEATURE_FIELDS
from services.gateway.desk import Desk
from services.gateway.errors import not_found
from services.gateway.inference import refuse
from services.messages import Report

SCHEMA_REVISION = 3
MAX_PAGE = 1000
FEATURES = (
    control_pb2.FEATURE_STREAM,
    control_pb2.FEATURE_CONVERSE,
    control_pb2.FEATURE_TOKENIZE,
    control_pb2.FEATURE_REASONING,
    *(feature for feature, path in FEATURE_FIELDS if path in BUILT),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A report and when it came, by the gateway's clock."""

    report: Report
    at_s: float


class Control:
    """The handlers, and the latest report of each engine."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._heard: dict[str, Heard] = {}
        self._start_time = Timestamp(seconds=int(time.time()))

    def report(self, report: Report) -> None:
        """An engine has said how it is."""
        self._heard[report.engine_id] = Heard(report, self._desk.clock())

    @property
    def step_s(self) -> float:
        """The longest recent step of any engine."""
        return max((heard.report.load.step_s for heard in self._heard.values()), default=0.0)

    async def list_models(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        """ListModels: the one model, on one page."""
        size = request.page_size if request.HasField("page_size") else 1
        if not 1 <= size <= MAX_PAGE:
            await refuse(context, invalid("page_size", f"{size} is not in [1, {MAX_PAGE}]"))
        if request.page_token:
            await refuse(context, invalid("page_token", "is not one that this server gave out"))
        return control_pb2.ListModelsResponse(models=[self._model()])

    async def get_model(self, request: control_pb2.GetModelRequest, context: Context) -> control_pb2.GetModelResponse:
        """GetModel."""
        known = self._desk.settings.model.id
        if request.model != known:
            await refuse(context, not_found("model", request.model, f"this server serves {known!r}"))
        return control_pb2.GetModelResponse(model=self._model())

    async def get_server_info(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """GetServerInfo: version, limits and what is built."""
        settings = self._desk.settings
        return control_pb2.GetServerInfoResponse(
            version=settings.version,
            schema_revision=SCHEMA_REVISION,
            gateway_id=settings.gateway_id,
            start_time=self._start_time,
            limits=self._limits(),
            features=FEATURES,
        )

    async def get_load(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.GetLoadResponse:
        """GetLoad: this gateway, and each engine as it last reported."""
        admission = self._desk.admission
        now_s = self._desk.clock()
        load = control_pb2.Load(
            open_requests=admission.num_requests,
            max_open_requests=admission.max_requests,
            reserved_tokens=admission.num_tokens,
            max_reserved_tokens=admission.max_tokens,
            engines=[_engine_load(heard, now_s) for _, heard in sorted(self._heard.items())],
        )
        return control_pb2.GetLoadResponse(load=load)

    def _model(self) -> control_pb2.Model:
        model, defaults = self._desk.settings.model, self._desk.settings.model.defaults
        refusal: ServiceError | None = self._desk.refusal
        report = next((heard.report for _, heard in sorted(self._heard.items())), None)
        return control_pb2.Model(
            id=model.id,
            revision=model.revision,
            architecture=model.architecture,
            dtype=report.dtype if report else "",
            parameter_count=report.num_parameters if report else 0,
            context_length=model.context_length,
            vocab_size=self._desk.settings.limits.vocab_size,
            eos_token_ids=model.eos_ids,
            defaults=types_pb2.SamplingParams(
                max_tokens=defaults.max_tokens or None,
                temperature=defaults.temperature,
                top_k=defaults.top_k,
                top_p=defaults.top_p,
                min_p=defaults.min_p,
            ),
            state=control_pb2.MODEL_STATE_READY if refusal is None else control_pb2.MODEL_STATE_LOADING,
        )

    def _limits(self) -> control_pb2.ServerLimits:
        settings, limits = self._desk.settings, self._desk.settings.limits
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
            stall_timeout=duration(settings.stall_timeout_s),
            max_stream_generations=settings.max_stream_generations,
            max_stream_frames_per_second=settings.max_stream_frames_per_s,
            max_credit=limits.max_credit,
        )


def _engine_load(heard: Heard, now_s: float) -> control_pb2.EngineLoad:
    load = heard.report.load
    return control_pb2.EngineLoad(
        engine_id=heard.report.engine_id,
        waiting_requests=load.num_waiting,
        running_requests=load.num_running,
        total_blocks=load.num_blocks,
        free_blocks=load.num_free_blocks,
        block_size=load.block_size,
        step_time=duration(load.step_s),
        tokens_per_second=load.tokens_per_s,
        preemptions=load.num_preemptions,
        prefix_hit_tokens=load.prefix_hit_tokens,
        prefix_query_tokens=load.prefix_query_tokens,
        age=duration(now_s - heard.at_s),
    )
