"""The description of the HTTP API in OpenAPI's format, made from the table of routes. Pure."""

import re
from collections.abc import Sequence

import msgspec

from sluice_server.services.edge.report import Json
from sluice_server.services.edge.routes import EdgeRoute

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REFERENCE = "#/components/schemas/{name}"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
KEYS: Json = {  # either one; a service without an access file needs none
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def description(routes: Sequence[EdgeRoute], version: str, root_path: str) -> Json:
    """Returns the description of `routes`, which a proxy serves below `root_path`."""
    bodies = list(dict.fromkeys(one.body for one in routes if one.body is not None))
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sluice", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}, "securitySchemes": KEYS},
    }


def _operation(route: EdgeRoute) -> Json:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
    made: Json = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path)}".rstrip("_"),
        "summary": route.summary,
        "responses": {
            "200": {"description": "the answer", "content": {kind: {} for kind in route.answers}},
            "default": {"description": "an error", "content": error},
        },
        "security": [{}, *([] if route.is_open else [{name: []} for name in KEYS])],
    }
    names = [found.group(1) for found in _PARAMETER.finditer(route.path)]
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        schema = {"$ref": _REFERENCE.format(name=route.body.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made
