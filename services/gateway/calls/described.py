"""Describes models and the server as messages of the contract."""

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from sluice.v1 import control_pb2

from sluice_server.engine.executor.computing import UNKNOWN
from sluice_server.engine.request import Limits
from sluice_server.services.gateway.contract.durations import to_duration
from sluice_server.services.gateway.contract.embedding import embeds
from sluice_server.services.gateway.contract.fields import BUILT, FEATURE_FIELDS
from sluice_server.services.gateway.contract.parameters import model_defaults
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.messages.processes import Report

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


def model_message(
    settings: GatewaySettings, report: Report | None, state: "control_pb2.ModelState.ValueType", adapters: Iterable[str]
) -> control_pb2.Model:
    """Returns the description of a model; `report` is one of its engines'."""
    model = settings.model
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
        vocab_size=settings.limits.vocab_size,
        eos_token_ids=model.eos_ids,
        defaults=model_defaults(model.defaults),
        create_time=Timestamp(seconds=model.created_s) if model.created_s else None,
        state=state,
        tasks=tasks(model),
        embedding_width=model.vector_width if embeds(model) else 0,
        adapters=adapters,
    )


def server_limits(settings: GatewaySettings) -> control_pb2.ServerLimits:
    """Returns the limits in force for requests to a model."""
    limits = settings.limits
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
