"""What a request says of the model that is to answer it: id, revision, and an adapter."""

from typing import TypeAlias

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.checks import check_takes_adapters
from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.contract.errors import loading, not_found
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo

OfModel: TypeAlias = (
    types_pb2.GenerationSpec
    | inference_pb2.TokenizeRequest
    | inference_pb2.DetokenizeRequest
    | inference_pb2.EmbedRequest
    | inference_pb2.ClassifyRequest
    | inference_pb2.RerankRequest
    | inference_pb2.ScoreRequest
)


def adapter_of(spec: types_pb2.GenerationSpec, settings: GatewaySettings) -> str:
    """Returns the name of the adapter that a generation names, in `adapter` or as its model; "" for the base. Raises
    `ServiceError` for another model or revision."""
    model, named = settings.model, spec.adapter
    if named:
        check_takes_adapters(settings.limits)
    if not spec.HasField("model") or model.is_named(spec.model) or not settings.limits.max_adapters:
        check_model(spec, model)
        return named
    check_revision(spec, model)
    as_model = spec.model.removeprefix(f"{model.id}:")
    if named and named != as_model:
        raise invalid("adapter", f"is {named[:64]!r}, and model names {as_model[:64]!r}: leave one of the two out")
    return as_model


def check_model(request: OfModel, model: ModelInfo) -> None:
    """Raises `ServiceError` unless the request names the model and revision that are served, or none."""
    if request.HasField("model") and not model.is_named(request.model):
        raise not_found("model", request.model, f"this server serves {model.id!r}")
    check_revision(request, model)


def check_revision(request: OfModel, model: ModelInfo) -> None:
    """Raises `ServiceError` unless the request names the revision that is served, or none."""
    if not request.HasField("revision") or request.revision in filter(None, (model.revision, model.label)):
        return
    if not model.revision:
        raise loading()
    raise not_found("model", f"{model.id}@{request.revision}", f"this server serves revision {model.revision!r}")
