"""Authenticates every RPC and checks its scope. Handlers find the caller in `CALLER`.

An interceptor, so that every service is guarded, including ones added later. One table names the scopes of each method;
a method that is not in the table needs `admin`.
"""

import hmac
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc

from sluice_server.engine.errors import ServiceError
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.identity import (
    CALLER,
    LOCAL,
    AccessPolicy,
    Identity,
    Scope,
    not_allowed,
    unauthenticated,
)
from sluice_server.services.gateway.access.metadata import Context, read_trace
from sluice_server.services.gateway.calls.peers import PEER_KEY, TENANT_KEY
from sluice_server.services.gateway.calls.refusal import refuse, turn_away
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry.logs import about_trace
from sluice_server.services.telemetry.observed import Observer

REFRESH_S = 1.0
NO_SCOPES: frozenset[Scope] = frozenset()
GENERATE = frozenset({Scope.GENERATE})
ANY = frozenset(Scope)
CONTROL = frozenset({Scope.CONTROL, Scope.ADMIN})
ADMIN = frozenset({Scope.ADMIN})


def _methods(service: str, scopes: frozenset[Scope], *names: str) -> dict[str, frozenset[Scope]]:
    return {f"/{service}/{name}": scopes for name in names}


_INFERENCE, _CONTROL = "sluice.v1.InferenceService", "sluice.v1.ControlService"
_OIP = "inference.GRPCInferenceService"
_VLLM = "vllm.grpc.engine.VllmEngine"
SCOPES: Mapping[str, frozenset[Scope]] = {  # any one of them is enough; an empty set needs no credentials
    **_methods(_INFERENCE, GENERATE, "Generate", "StreamGenerate", "Converse", "ResumeGenerate", "CancelGeneration"),
    **_methods(_INFERENCE, GENERATE, "Tokenize", "Detokenize", "Embed", "Classify", "Rerank", "Score"),
    **_methods(_CONTROL, ANY, "ListModels", "GetModel", "ListAdapters", "GetServerInfo", "GetTokenizer"),
    **_methods(_CONTROL, CONTROL, "GetLoad", "WatchLoad", "WatchModels"),
    **_methods(
        _CONTROL,
        ADMIN,
        "LoadModel",
        "UnloadModel",
        "SleepModel",
        "WakeModel",
        "SetAlias",
        "Drain",
        "SubscribeKvEvents",
        "Profile",
        "ResizeCache",
        "ClearCache",
    ),
    **_methods(_CONTROL, ADMIN, "LoadAdapter", "UnloadAdapter"),
    **_methods(_OIP, NO_SCOPES, "ServerLive", "ServerReady", "ModelReady"),
    **_methods(_OIP, ANY, "ServerMetadata", "ModelMetadata", "ModelConfig", "RepositoryIndex"),
    **_methods(_OIP, CONTROL, "ModelStatistics"),
    **_methods(_OIP, GENERATE, "ModelInfer", "ModelStreamInfer"),
    **_methods(_VLLM, NO_SCOPES, "HealthCheck"),
    **_methods(_VLLM, ANY, "GetModelInfo", "GetServerInfo", "GetTokenizer"),
    **_methods(_VLLM, CONTROL, "GetLoads", "SubscribeKvEvents"),
    **_methods(_VLLM, GENERATE, "Generate", "Abort", "Embed"),
    **_methods(_VLLM, ADMIN, "FlushCache", "StartProfile", "StopProfile"),
    **_methods("grpc.health.v1.Health", NO_SCOPES, "Check", "Watch", "List"),
    **_methods("grpc.reflection.v1.ServerReflection", ANY, "ServerReflectionInfo"),
    **_methods("grpc.reflection.v1alpha.ServerReflection", ANY, "ServerReflectionInfo"),
}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # in quotes: the class is not generic at run time
Behaviour: TypeAlias = Callable[[Any, Context], Any]
KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor. With `access` None, every caller is of one tenant."""

    def __init__(
        self,
        access: WatchedFile[AccessPolicy] | None,
        clock: Callable[[], float],
        observer: Observer,
        peer_secret: str = "",
        keyless: Identity = LOCAL,
    ) -> None:
        """`observer` gets every refused call. `peer_secret` is what another gateway sends with a forwarded call; ""
        accepts no forwarded calls. `keyless` is the caller of every call where `access` is None."""
        self._observer = observer
        self._access = access
        self._peer_secret = peer_secret
        self._keyless = keyless
        self._clock = clock
        self._looked_s = clock()
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the handler with the check in front, made once for each method that exists."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # grpc answers that the method does not exist
            self._guarded[method] = self._behind_check(method, handler)
        return self._guarded[method]

    def identify(self, method: str, context: Context) -> Identity:
        """Returns the caller's identity. Raises ServiceError CREDENTIALS_INVALID or NOT_ALLOWED."""
        wanted = SCOPES.get(method, ADMIN)
        if self._access is None or not wanted:
            return self._keyless
        tenant = self._handed_on_for(context)
        if tenant is not None and Scope.GENERATE in wanted:
            return Identity(tenant, GENERATE)
        identity = _authenticated(self._fresh(self._access), context)
        if not identity.scopes & wanted:
            raise not_allowed(method.rpartition("/")[2], wanted)
        return identity

    def _handed_on_for(self, context: Context) -> str | None:
        """Returns the tenant of a call that another gateway forwards with the shared secret; otherwise None."""
        found = {key: value for key, value in context.invocation_metadata() or () if key in (PEER_KEY, TENANT_KEY)}
        shown = str(found.get(PEER_KEY, ""))
        if not self._peer_secret or not hmac.compare_digest(shown.encode(), self._peer_secret.encode()):
            return None
        return str(found.get(TENANT_KEY, ""))

    def _fresh(self, access: WatchedFile[AccessPolicy]) -> AccessPolicy:
        now_s = self._clock()
        if now_s - self._looked_s >= REFRESH_S:
            self._looked_s = now_s
            access.refresh()
        return access.value

    def _behind_check(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> Handler:
        unary, stream = (handler.unary_unary, handler.unary_stream), (handler.stream_unary, handler.stream_stream)
        kinds: tuple[Any, ...] = unary + stream
        run = _as_coroutine(next(one for one in kinds if one is not None))

        async def checked(request: object, context: Context) -> object:
            try:
                try:
                    CALLER.set(self.identify(method, context))
                except ServiceError as error:
                    await turn_away(self._observer, method, context, error)
                answering = _answered(run(request, context), method, context)
                del request  # else the traceback of an error that grpc keeps would hold it
                return await answering
            except grpc.aio.AbortError as aborted:
                # grpc keeps the error and raises it again. With our frames it would be in a cycle that is never freed.
                aborted.__traceback__ = aborted.__context__ = None
                return None

        make = KINDS[(bool(handler.request_streaming), bool(handler.response_streaming))]
        return make(checked, handler.request_deserializer, handler.response_serializer)


async def _answered(answering: Awaitable[object], method: str, context: Context) -> object:
    """Awaits the handler. An unexpected exception is logged and becomes a status; its text is not sent to the
    client."""
    try:
        return await answering
    except (ServiceError, grpc.aio.BaseError):
        raise  # the call has its status already
    except Exception as error:  # grpc would send its text to the client
        extra = about_trace(read_trace(context), method=method)
        await refuse(context, fault(Role.GATEWAY, extra, "failed in the handler of this call", error))
        raise


def _as_coroutine(behaviour: Behaviour) -> Behaviour:
    """Wraps an asynchronous generator as a coroutine. grpc inspects the kind of a handler; reflection's is a
    generator."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def write_all(request: object, context: Context) -> None:
        async for message in behaviour(request, context):
            await context.write(message)

    return write_all


def _authenticated(access: AccessPolicy, context: Context) -> Identity:
    """Returns the identity of a sent key; only without one, that of the client certificate."""
    given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    if not given:
        found = access.by_names(_certificate_names(context.auth_context()))
        if found is None:
            raise unauthenticated("no credentials: send metadata `authorization: Bearer <key>`, or a known certificate")
        return found
    kind, _, key = str(given[0]).partition(" ")
    found = access.by_key(key.strip()) if len(given) == 1 and kind.lower() == "bearer" else None
    if found is None:
        raise unauthenticated("the credentials are not valid: send one `authorization: Bearer <key>` with a known key")
    return found


def _certificate_names(peer: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Returns the subject alternative names, then the common name, of the certificate that grpc has verified."""
    kinds = ("x509_subject_alternative_name", "x509_common_name")
    return [name.decode("utf-8", "replace") for kind in kinds for name in peer.get(kind, ())]
