"""Stands before every RPC: finds out who calls and whether they may. What passes finds its caller in `CALLER`.

An interceptor, so that no service, whoever adds it, is left unguarded. Which scope a method needs is one table; a
method that is not in it needs `admin`.
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
from sluice_server.services.messages.messages import Role
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry.logs import about_trace
from sluice_server.services.telemetry.observed import Observer

REFRESH_S = 1.0
NOBODY: frozenset[Scope] = frozenset()
GENERATE = frozenset({Scope.GENERATE})
ANY = frozenset(Scope)
CONTROL = frozenset({Scope.CONTROL, Scope.ADMIN})
ADMIN = frozenset({Scope.ADMIN})


def _methods(service: str, scopes: frozenset[Scope], *names: str) -> dict[str, frozenset[Scope]]:
    return {f"/{service}/{name}": scopes for name in names}


_INFERENCE, _CONTROL = "sluice.v1.InferenceService", "sluice.v1.ControlService"
_OIP = "inference.GRPCInferenceService"
SCOPES: Mapping[str, frozenset[Scope]] = {  # any one of them is enough; none: open to all who can connect
    **_methods(_INFERENCE, GENERATE, "Generate", "StreamGenerate", "Converse", "ResumeGenerate", "CancelGeneration"),
    **_methods(_INFERENCE, GENERATE, "Tokenize", "Detokenize", "Embed"),
    **_methods(_CONTROL, ANY, "ListModels", "GetModel", "GetServerInfo"),
    **_methods(_CONTROL, CONTROL, "GetLoad", "WatchLoad"),
    **_methods(_CONTROL, ADMIN, "LoadModel", "UnloadModel", "Drain"),
    **_methods(_OIP, NOBODY, "ServerLive", "ServerReady", "ModelReady"),
    **_methods(_OIP, ANY, "ServerMetadata", "ModelMetadata"),
    **_methods(_OIP, GENERATE, "ModelInfer", "ModelStreamInfer"),
    **_methods("grpc.health.v1.Health", NOBODY, "Check", "Watch", "List"),
    **_methods("grpc.reflection.v1.ServerReflection", ANY, "ServerReflectionInfo"),
    **_methods("grpc.reflection.v1alpha.ServerReflection", ANY, "ServerReflectionInfo"),
}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # in quotes: a plain class at run time
Behaviour: TypeAlias = Callable[[Any, Context], Any]
_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Guard(grpc.aio.ServerInterceptor):
    """`access` None lets everybody in as the one local tenant."""

    def __init__(
        self,
        access: WatchedFile[AccessPolicy] | None,
        clock: Callable[[], float],
        observer: Observer,
        peer_secret: str = "",
    ) -> None:
        """`observer` is told of who is turned away; `peer_secret`: what another gateway shows that hands on a call; ""
        believes nobody."""
        self._observer = observer
        self._access = access
        self._peer_secret = peer_secret
        self._clock = clock
        self._looked_s = clock()
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler behind the check, made once for each method that exists."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # grpc itself says that there is no such method
            self._guarded[method] = self._behind_check(method, handler)
        return self._guarded[method]

    def identify(self, method: str, context: Context) -> Identity:
        """Who calls. Raises ServiceError CREDENTIALS_INVALID or NOT_ALLOWED."""
        wanted = SCOPES.get(method, ADMIN)
        if self._access is None or not wanted:
            return LOCAL
        tenant = self._handed_on_for(context)
        if tenant is not None and Scope.GENERATE in wanted:
            return Identity(tenant, GENERATE)
        identity = _authenticated(self._fresh(self._access), context)
        if not identity.scopes & wanted:
            raise not_allowed(method.rpartition("/")[2], wanted)
        return identity

    def _handed_on_for(self, context: Context) -> str | None:
        """The tenant for whom another gateway, which knows the secret, hands on the call."""
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
                del request  # the traceback of an error that grpc keeps would hold it
                return await answering
            except grpc.aio.AbortError as aborted:
                # grpc keeps it, and raises it again itself: with our frames it would hold what holds it, for good.
                aborted.__traceback__ = aborted.__context__ = None
                return None

        make = _KINDS[(bool(handler.request_streaming), bool(handler.response_streaming))]
        return make(checked, handler.request_deserializer, handler.response_serializer)


async def _answered(answering: Awaitable[object], method: str, context: Context) -> object:
    """What the handler answers; a fault of ours has its status and its line in the log, and its text stays inside."""
    try:
        return await answering
    except (ServiceError, grpc.aio.BaseError):
        raise  # the call has its status
    except Exception as error:  # grpc itself would tell the client its text
        told = about_trace(read_trace(context), method=method)
        await refuse(context, fault(Role.GATEWAY, told, "failed in the handler of this call", error))
        raise


def _as_coroutine(behaviour: Behaviour) -> Behaviour:
    """grpc tells the kinds of handlers apart by inspection; reflection's is a generator, all others are coroutines."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def write_all(request: object, context: Context) -> None:
        async for message in behaviour(request, context):
            await context.write(message)

    return write_all


def _authenticated(access: AccessPolicy, context: Context) -> Identity:
    """A key that is sent counts before a certificate that is shown."""
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
    """Subject alternative names, then the common name, of a certificate that grpc has verified."""
    kinds = ("x509_subject_alternative_name", "x509_common_name")
    return [name.decode("utf-8", "replace") for kind in kinds for name in peer.get(kind, ())]
