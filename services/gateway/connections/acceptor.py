"""The accept loops of a grpc.aio server: one per method, and one for calls of unknown methods.

The loop of grpc.aio (1.85.1) decodes the path of each call, and stops the server at a path that is not UTF-8: four
bytes of one client closed every connection. Here gRPC core finds the method by comparing bytes. A call of an unknown
method is answered UNIMPLEMENTED, and its path is never decoded. Uses private parts of grpc.aio. `MISSING` names those
that the installed version lacks; if there are any, `server` returns a plain grpc.aio server and logs a warning.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int]]
Table = Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
NO_METHOD = "no such method"  # its name in logs
_PARTS = ("_handle_rpc", "_schedule_rpc_coro", "_MethodResolver", "get_working_loop")
_LOOP = ("_make_request_call_future", "_request_call", "_request_registered_call")
MISSING = [name for name in _PARTS if not hasattr(cygrpc, name)] + [
    name for name in _LOOP if not hasattr(cygrpc.AioServer, name)
]


class _NoEcho(logging.Filter):
    """Drops a log message with which clients could fill the log.

    grpc logs a traceback for each header that is not UTF-8, each time that the headers are read. It decodes them as
    Latin-1; the gateway checks its own headers where it reads them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        return record.msg != "Invalid encoding on %s"


_NO_ECHO = _NoEcho()


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc] # a class without types
    """The inner server of grpc.aio.server. The accept loop of grpc.aio starts these loops, waits for their end, and
    starts them again if necessary."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Options,
        on_given_up: Callable[[], None],
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._event_loop = loop
        self._on_given_up = on_given_up
        self._interceptors_of_methods = tuple(interceptors)
        self._methods: dict[str, Any] = {}
        self._running: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, method_handlers: Table) -> None:
        """Registers methods by their full path."""
        super().add_registered_method_handlers(dict(method_handlers))
        self._methods.update(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Task[NoReturn]":
        """Returns a task that accepts all calls of a method until the server stops. grpc.aio expects a future of one
        call."""
        return self._event_loop.create_task(self._accept(method), name="gRPC accept")

    async def _accept(self, method: bytes | None) -> NoReturn:
        """Starts each call of a method; None stands for unknown methods. Ends with grpc's error when the server
        stops."""
        name = NO_METHOD if method is None else method.decode()
        resolver = cygrpc._MethodResolver([], {} if method is None else self._methods)
        interceptors = () if method is None else self._interceptors_of_methods
        while True:
            call = await (self._request_call() if method is None else self._request_registered_call(method))
            handling = cygrpc._handle_rpc(name, resolver, interceptors, call, self._event_loop, False)
            running = cygrpc._schedule_rpc_coro(self._counted(handling), call, self._event_loop, name)
            task = self._event_loop.create_task(running, name="gRPC call")
            self._running.add(task)  # the event loop keeps only weak references to tasks
            task.add_done_callback(self._running.discard)

    async def _counted(self, handling: Awaitable[None]) -> None:
        try:
            await handling
        except asyncio.CancelledError:
            self._on_given_up()
            raise


class _Server(_server.Server):
    """The class of grpc.aio.server, with an `_Acceptor` inside."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options, on_given_up: Callable[[], None]
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Acceptor(self._loop, interceptors, options, on_given_up)


def server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Options,
    on_given_up: Callable[[], None] = lambda: None,
) -> Any:  # noqa: ANN401 # in the type package this is no grpc.aio.Server
    """Returns a grpc.aio server; services are added with `add_registered_method_handlers`. `on_given_up` is called for
    each call that ends before its answer by its client's reset, deadline or loss."""
    logging.getLogger(cygrpc.__name__).addFilter(_NO_ECHO)  # adding it again has no effect
    if MISSING:
        log.warning(
            "grpcio %s has no %s: a path that is not UTF-8 stops its server until another is there, and calls that are "
            "reset as they begin go unnoticed; install 1.85.1",
            grpc.__version__,
            ", ".join(MISSING),
        )
        return grpc.aio.server(options=options, interceptors=interceptors)
    return _Server(interceptors, options, on_given_up)
