"""The HTTP application: the routes and what answers a request that fails.

A client of one gRPC channel. Credentials and trace context of each request are passed on unchanged. Stateless.
"""

import time
from collections.abc import Callable
from typing import Any

import grpc
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from sluice_server.services.edge.errors import EdgeError, from_rpc
from sluice_server.services.edge.exchange import ID, Exchange
from sluice_server.services.edge.observed import HttpObserver, UnobservedHttp
from sluice_server.services.edge.openapi import description
from sluice_server.services.edge.responses import BROKEN, GONE, as_json, refusal, unroutable
from sluice_server.services.edge.routes import EdgeRoute, table
from sluice_server.services.edge.settings import HttpSettings
from sluice_server.version import VERSION

# Statelessness: a browser sends no cookie, and keys only in headers that a page sets itself.
HEADERS_OF_PAGES = ("*",)
HEADERS_FOR_PAGES = (ID, "retry-after")
PREFLIGHT_S = 600


def build(
    channel: grpc.aio.Channel,
    settings: HttpSettings = HttpSettings(),  # noqa: B008 # frozen
    observer: HttpObserver | None = None,
    clock: Callable[[], float] = time.time,
) -> ASGIApp:
    """Returns the application in front of `channel`; `clock` gives the seconds since 1970 for the answers."""
    observer = observer or UnobservedHttp()
    routes = table(channel, observer, clock)

    async def describe(request: Request) -> Response:
        """GET /openapi.json."""
        return as_json(description(routes, VERSION, settings.root_path))

    routes.append(EdgeRoute("/openapi.json", describe, "Describe this API", is_open=True))
    paths = frozenset(one.path for one in routes)
    handlers: dict[Any, Callable[[Request, Any], Response]] = {
        EdgeError: lambda request, error: refusal(error),
        grpc.aio.AioRpcError: lambda request, error: refusal(from_rpc(error)),
        HTTPException: lambda request, error: refusal(unroutable(request, error, paths)),
        ClientDisconnect: lambda request, error: refusal(GONE),  # for statistics only: its client is gone
        Exception: lambda request, error: refusal(BROKEN),
    }
    app: ASGIApp = Starlette(routes=[one.served() for one in routes], exception_handlers=handlers)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=HEADERS_OF_PAGES,
            expose_headers=HEADERS_FOR_PAGES,
            max_age=PREFLIGHT_S,
        )
    return Exchange(app, settings, observer, {one.handler: one.path for one in routes})
