"""Builds the grpc.aio server: channel options, services, reflection, port. All set-up of grpc is in this file."""

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import _async as reflection
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.access.tls import server_credentials
from sluice_server.services.gateway.calls.cache import CacheCalls
from sluice_server.services.gateway.calls.control import Control
from sluice_server.services.gateway.calls.converse import Converse
from sluice_server.services.gateway.calls.inference import Inference
from sluice_server.services.gateway.calls.large import LargeRequestQueue
from sluice_server.services.gateway.calls.models import ModelCalls
from sluice_server.services.gateway.calls.profile import ProfileCalls
from sluice_server.services.gateway.calls.refusal import turn_away
from sluice_server.services.gateway.calls.serialized import serialized
from sluice_server.services.gateway.connections import acceptor
from sluice_server.services.gateway.connections.threads import yielding_threads
from sluice_server.services.gateway.contract import wire
from sluice_server.services.gateway.contract.errors import malformed
from sluice_server.services.gateway.oip.service import SERVICE as OIP
from sluice_server.services.gateway.oip.service import OpenInference
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.process.listening import check_plaintext
from sluice_server.services.telemetry.observed import Observer

INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
CONTROL: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
HEALTH = "grpc.health.v1.Health"
LISTED = (INFERENCE.full_name, CONTROL.full_name, OIP.full_name, HEALTH)  # by reflection; each one has a health
WHILE_NOT_SERVING = frozenset({CONTROL.full_name, HEALTH})  # they answer while no request is admitted
Behaviour = Callable[[Any, Context], Awaitable[Any]]
TurnAway = Callable[[Context, ServiceError], Awaitable[NoReturn]]

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    """The services of one server, and their handlers by method."""

    tables: Sequence[tuple[ServiceDescriptor, Mapping[str, Behaviour]]]
    observer: Observer  # gets the refusals of calls that reach no handler
    large: LargeRequestQueue = dataclasses.field(default_factory=lambda: LargeRequestQueue(time.thread_time))


@dataclasses.dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of the services of `--listen`."""

    inference: Inference
    converse: Converse
    control: Control
    models: ModelCalls
    profiles: ProfileCalls
    caches: CacheCalls
    adapter: OpenInference
    observer: Observer  # as in `Services`
    large: LargeRequestQueue  # as in `Services`

    def services(self) -> Services:
        """Returns the services with their tables."""
        tables = (
            (INFERENCE, inference_table(self)),
            (CONTROL, control_table(self.control, self.models, self.profiles, self.caches)),
            (OIP, self.adapter.table()),
        )
        return Services(tables, self.observer, self.large)


def options(settings: GatewaySettings) -> tuple[tuple[str, int], ...]:
    """Returns the channel arguments. grpc ignores unknown keys silently, so a test looks each one up in its binary."""
    return (
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_send_message_length", settings.max_send_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # the default of a minute would override the line above
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", 60 * 60_000),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.enable_channelz", 1),  # `connections` reads its counters
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Calls of one method that the event loop has not taken yet. Above this number grpc ends some of them at random
        # as CANCELLED, above the hard limit all. All calls that one connection may send at once must fit, so grpc's
        # default of 1,000 is too low. Each waiting call holds 34 KB, even after its client has cancelled it.
        ("grpc.server.max_pending_requests", settings.max_concurrent_streams),
        ("grpc.server.max_pending_requests_hard_limit", 2 * settings.max_concurrent_streams),
    )


def build(
    settings: GatewaySettings,
    guard: grpc.aio.ServerInterceptor,
    services: Services,
    checks: health.aio.HealthServicer,
    on_given_up: Callable[[], None] = lambda: None,
) -> grpc.aio.Server:
    """Returns a server with these services, health and reflection, not yet listening. `on_given_up`: see
    `acceptor.server`."""
    with yielding_threads():
        server: grpc.aio.Server = acceptor.server((guard,), options(settings), on_given_up)
    most = wire.bounds(settings)
    for descriptor, table in services.tables:
        server.add_registered_method_handlers(descriptor.full_name, _service(descriptor, table, services, most))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if settings.reflection:
        _add_reflection(server, [descriptor.full_name for descriptor, _ in services.tables])
    return server


def listen(server: grpc.aio.Server, settings: GatewaySettings) -> int:
    """Binds the address and returns the port. Raises `ServiceError` LISTEN_FAILED when the address is not available,
    and one that names the setting for an unusable certificate or a plaintext address that other hosts can reach."""
    check_plaintext("listen", settings.listen, settings.tls is not None, settings.insecure)
    credentials = server_credentials(settings.tls) if settings.tls is not None else None
    try:
        if credentials is not None:
            port = server.add_secure_port(settings.listen, credentials)
        else:
            port = server.add_insecure_port(settings.listen)
        if settings.peer_socket:
            server.add_insecure_port(f"unix:{settings.peer_socket}")
    except RuntimeError:
        port = 0
    if port:
        return port
    raise ServiceError(
        Code.FAILED_PRECONDITION,
        "LISTEN_FAILED",
        f"cannot listen on {settings.listen}: the port is in use or the address is not of this host; "
        "stop the other server or choose another port",
    )


def inference_table(handlers: Handlers) -> Mapping[str, Behaviour]:
    """Returns the implemented methods of InferenceService and their handlers."""
    inference = handlers.inference
    return {
        "Converse": handlers.converse.converse,
        "Generate": inference.generate,
        "StreamGenerate": inference.stream_generate,
        "ResumeGenerate": inference.resume_generate,
        "CancelGeneration": inference.cancel_generation,
        "Tokenize": inference.tokenize,
        "Detokenize": inference.detokenize,
        "Embed": inference.embed,
        "Classify": inference.classify,
        "Rerank": inference.rerank,
        "Score": inference.score,
    }


def control_table(
    control: Control, models: ModelCalls, profiles: ProfileCalls, caches: CacheCalls
) -> Mapping[str, Behaviour]:
    """Returns the implemented methods of ControlService and their handlers."""
    return {
        "ListModels": models.list_models,
        "GetModel": models.get,
        "LoadModel": models.load,
        "UnloadModel": models.unload,
        "SleepModel": models.sleep,
        "WakeModel": models.wake,
        "SetAlias": models.set_alias,
        "WatchModels": models.watch,
        "GetServerInfo": control.get_server_info,
        "GetLoad": control.get_load,
        "WatchLoad": control.watch_load,
        "LoadAdapter": control.adapters.load,
        "UnloadAdapter": control.adapters.unload,
        "ListAdapters": control.adapters.list,
        "Drain": control.drain,
        "Profile": profiles.profile,
        "ResizeCache": caches.resize_cache,
        "ClearCache": caches.clear_cache,
        "GetTokenizer": control.get_tokenizer,
        "SubscribeKvEvents": control.subscribe_kv_events,
    }


def _service(
    descriptor: ServiceDescriptor,
    behaviours: Mapping[str, Behaviour],
    services: Services,
    most: Mapping[str, int],
) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
    handlers = {}
    for method in descriptor.methods:
        make = _KINDS[(method.client_streaming, method.server_streaming)]
        away = functools.partial(turn_away, services.observer, f"/{descriptor.full_name}/{method.name}")
        behaviour = behaviours.get(method.name) or refusal(method.name, away)
        level = wire.level_of(method.input_type, most)
        parse = _parser(message_factory.GetMessageClass(method.input_type), level)
        handlers[method.name] = make(
            guarded(behaviour, method.input_type.name, away, parse, services.large),
            request_deserializer=parse if method.client_streaming else _later(parse),
            response_serializer=serialized,
        )
    return handlers


class MalformedRequest:
    """Stands for bytes that cannot be parsed. Without it grpc would answer INTERNAL, which means a fault of the
    server."""


Parse = Callable[[bytes], Message | MalformedRequest]


def _parser(message: type[Message], level: wire.Level) -> Parse:
    def parse(data: bytes) -> Message | MalformedRequest:
        try:
            return message.FromString(wire.cut_short(data, level))
        except (DecodeError, wire.TooManyFieldsError):
            return MalformedRequest()

    return parse


def _later(parse: Parse) -> Callable[[bytes], Message | MalformedRequest | bytes]:
    """Wraps `parse` so that large requests stay bytes: they are parsed later, when their tenant is known."""
    return lambda data: data if len(data) > wire.LARGE else parse(data)


def guarded(behaviour: Behaviour, type_name: str, away: TurnAway, parse: Parse, lane: LargeRequestQueue) -> Behaviour:
    """Wraps a handler: rejects malformed requests, and parses large ones when the `LargeRequestQueue` admits them.
    They come as
    bytes. The wrapper is a real coroutine function, because grpc inspects the kind of its handlers."""

    async def handle(request: object, context: Context) -> object:
        try:
            if isinstance(request, bytes):
                try:
                    async with lane.turn(CALLER.get().tenant, len(request)):
                        request = parse(request)
                except ServiceError as error:
                    await away(context, error)
            if isinstance(request, MalformedRequest):
                await away(context, malformed(type_name))
            return await behaviour(request, context)
        except grpc.aio.AbortError as error:
            # grpc keeps the error with the call, and its traceback keeps the frames with call and request. Each
            # refused call would hold 1 MiB until the next garbage collection.
            del request, context
            raise error.with_traceback(None)  # noqa: B904 # it is the same error

    return handle


def refusal(name: str, away: TurnAway) -> Behaviour:
    """Returns the handler of a method that is not implemented: it answers FEATURE_UNSUPPORTED. A real coroutine
    function, because grpc inspects the kind of its handlers."""

    async def refuse_method(request: object, context: Context) -> None:
        await away(context, unsupported(name, f"{name} is not supported by this server"))

    return refuse_method


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Adds reflection v1alpha, and v1, which has the same messages under another name."""
    servicer = reflection.ReflectionServicer([*names, HEALTH])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": handler})
