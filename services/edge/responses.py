"""HTTP responses: JSON, and errors in OpenAI's format."""

from collections.abc import Collection

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.report import Json

V1 = "/v1"
GONE = EdgeError(499, "cancelled", "the client closed its connection before it was answered")
BROKEN = EdgeError(500, "server_error", "the edge failed at this request; its log has the reason")


def unroutable(request: Request, error: HTTPException, paths: Collection[str]) -> EdgeError:
    """Returns the error for an unknown path or method; `paths` are known."""
    allow = (error.headers or {}).get("Allow", "")
    instead = f"; it takes {allow}" if allow else _instead(request.scope["path"], paths)
    text = f"{request.method} {request.url.path}: {error.detail}{instead}"
    made = EdgeError(error.status_code, "invalid_request_error", text, code="unknown_url")
    made.allow = allow
    return made


def _instead(path: str, paths: Collection[str]) -> str:
    """Returns what an unknown path was meant to be: OpenAI's clients are often given a base URL without its end."""
    for meant in (V1 + path, path.removeprefix(V1)):
        if meant in paths:
            return f"; {meant} is a path: a base URL for OpenAI's clients ends in {V1}, once"
    return "; /openapi.json lists the paths"


def as_json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refusal(error: EdgeError) -> Response:
    """Returns an error response in OpenAI's format."""
    return as_json(error.body(), error.status, error.headers())
