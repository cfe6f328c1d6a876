"""The loop in which a grpc.aio server takes its calls: one for each method, and one for all that is no method.

The loop of grpc.aio (1.85.1) decodes the path of each call and ends, with the server, at one that is not UTF-8: every
connection was then closed for four bytes of one client. Here core itself finds the method, by comparing bytes; what it
finds none for is answered UNIMPLEMENTED and its path is never decoded. Needs parts of grpc.aio that are not public:
`MISSING` names those that another version lacks: `server` then serves as grpc.aio does, and the log says so.
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
NO_METHOD = "no such method"  # what logs call it
_PARTS = ("_handle_rpc", "_schedule_rpc_coro", "_MethodResolver", "get_working_loop")
_LOOP = ("_make_request_call_future", "_request_call", "_request_registered_call")
MISSING = [name for name in _PARTS if not hasattr(cygrpc, name)] + [
    name for name in _LOOP if not hasattr(cygrpc.AioServer, name)
]


class _NoEcho(logging.Filter):
    """Keeps out what a client could fill the log with: grpc tells each header that is not UTF-8, with a traceback, each
    time that the headers of its call are looked at. It takes them as Latin-1; ours are checked where they are read."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is told."""
        return record.msg != "Invalid encoding on %s"


_NO_ECHO = _NoEcho()


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc] # a class without types
    """What grpc.aio.server holds. Its own loop starts ours, waits for their ends, and starts them anew if need be."""

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
        """Methods by their whole path."""
        super().add_registered_method_handlers(dict(method_handlers))
        self._methods.update(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Task[NoReturn]":
        """grpc.aio has this give one call. It gives none: it takes all of them, until the server stops."""
        return self._event_loop.create_task(self._accept(method), name="gRPC accept")

    async def _accept(self, method: bytes | None) -> NoReturn:
        """Start each call of a method; None is what core knows no method for. Ends in grpc's error when it stops."""
        name = NO_METHOD if method is None else method.decode()
        resolver = cygrpc._MethodResolver([], {} if method is None else self._methods)
        interceptors = () if method is None else self._interceptors_of_methods
        while True:
            call = await (self._request_call() if method is None else self._request_registered_call(method))
            handling = cygrpc._handle_rpc(name, resolver, interceptors, call, self._event_loop, False)
            running = cygrpc._schedule_rpc_coro(self._counted(handling), call, self._event_loop, name)
            task = self._event_loop.create_task(running, name="gRPC call")
            self._running.add(task)  # a loop holds its tasks only weakly
            task.add_done_callback(self._running.discard)

    async def _counted(self, handling: Awaitable[None]) -> None:
        try:
            await handling
        except asyncio.CancelledError:
            self._on_given_up()
            raise


class _Server(_server.Server):
    """grpc.aio.server's own class around our acceptor."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options, on_given_up: Callable[[], None]
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Acceptor(self._loop, interceptors, options, on_given_up)


def server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Options,
    on_given_up: Callable[[], None] = lambda: None,
) -> Any:  # noqa: ANN401 # which grpc.aio.Server is not in the types
    """A grpc.aio server, to which services are added by `add_registered_method_handlers`. `on_given_up` is told of each
    call that ends by its client's reset, deadline or loss, before an answer."""
    logging.getLogger(cygrpc.__name__).addFilter(_NO_ECHO)  # a second time does nothing
    if MISSING:
        log.warning(
            "grpcio %s has no %s: a path that is not UTF-8 stops its server until another is there, and calls that are "
            "reset as they begin go unnoticed; install 1.85.1",
            grpc.__version__,
            ", ".join(MISSING),
        )
        return grpc.aio.server(options=options, interceptors=interceptors)
    return _Server(interceptors, options, on_given_up)
