"""The small routes: health, version, load, metrics, keys; and the description of all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from sluice_server.services.edge.observed import UnobservedHttp
from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.version import VERSION
from tests.services.edge.edge_rig import EdgeRig, edge
from tests.services.gateway.fake_ring import MODEL, settings

CREATED_S = 1_700_000_000


async def get(rig: EdgeRig, path: str, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.get(rig.url + path, headers=headers)


class Page(UnobservedHttp):
    """An observer with a page."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str, int]] = []

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        assert seconds > 0
        self.ends.append((route, method, status))

    def exposition(self) -> bytes:
        return b"sluice_x 1\n"


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/ready", "/healthz"])
async def test_health_of_a_service_that_is_drained_and_gone(path: str) -> None:
    async with edge() as rig:
        while (await get(rig, path)).status_code != 200:
            continue
        rig.gateway.leave()
        while (found := await get(rig, path)).status_code != 503:
            continue
        assert found.json() == {"status": "NOT_SERVING"}


async def test_a_service_that_mends_itself_lives_and_admits_nothing() -> None:
    async with edge() as rig:
        rig.ring.answers_probes = False
        rig.lane.lost()
        while (await get(rig, "/health/ready")).status_code != 503:
            continue
        assert (await get(rig, "/health")).status_code == 200


async def test_version_load_and_metrics() -> None:
    page = Page()
    async with edge(settings(max_open_requests=7), observer=page) as rig:
        assert (await get(rig, "/version")).json() == {"version": VERSION}
        load = (await get(rig, "/load")).json()
        assert load == {"server_load": 0, "max_server_load": 7, "running": 0, "waiting": 0}
        found = await get(rig, "/metrics")
        assert found.text == "sluice_x 1\n" and found.headers["content-type"].startswith("text/plain; version=")
        await get(rig, "/v1/models/none")
        await get(rig, "/ping")
        await get(rig, "/made-up")
    assert page.ends == [
        ("/version", "GET", 200),
        ("/load", "GET", 200),
        ("/metrics", "GET", 200),
        ("/v1/models/{model:path}", "GET", 404),
        ("/ping", "GET", 200),
        ("other", "GET", 404),
    ]


async def test_what_is_told_of_a_model() -> None:
    async with edge(settings(model=dataclasses.replace(MODEL, created_s=CREATED_S))) as rig:
        wanted = {"id": "toy", "object": "model", "created": CREATED_S, "owned_by": "sluice", "max_model_len": 1000}
        assert (await get(rig, "/v1/models")).json()["data"] == [wanted]
        assert (await get(rig, "/v1/models/toy")).json() == wanted


async def test_a_key_is_taken_from_either_header(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(
        f'[[keys]]\nsha256 = "{digest_of("right").hex()}"\ntenant = "acme"\nscopes = ["generate"]\n'
        f'[[keys]]\nsha256 = "{digest_of("watch").hex()}"\ntenant = "ops"\nscopes = ["control"]\n'
    )
    async with edge(settings(access_file=file)) as rig:
        path = "/v1/models"
        assert (await get(rig, path, **{"x-api-key": "right"})).status_code == 200
        assert (await get(rig, path, **{"x-api-key": "right", "authorization": "Bearer right"})).status_code == 200
        assert (await get(rig, path, **{"x-api-key": "wrong"})).status_code == 401
        both = await get(rig, path, **{"x-api-key": "right", "authorization": "Bearer wrong"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "x-api-key")
        assert (await get(rig, "/load", **{"x-api-key": "right"})).status_code == 403
        assert (await get(rig, "/load", **{"x-api-key": "watch"})).status_code == 200
        for one in ("/health", "/health/ready", "/version", "/metrics", "/openapi.json", "/"):
            assert (await get(rig, one)).status_code == 200, one


def references(value: Any) -> list[str]:  # noqa: ANN401 # JSON
    """Every $ref in a document."""
    if isinstance(value, dict):
        return [*([value["$ref"]] if "$ref" in value else []), *(one for v in value.values() for one in references(v))]
    return [one for each in value for one in references(each)] if isinstance(value, list) else []


async def test_the_description_is_of_what_is_there() -> None:
    async with edge() as rig:
        made = (await get(rig, "/openapi.json")).json()
        assert made["openapi"].startswith("3.1") and made["info"]["version"] == VERSION
        operations = [(path, verb, one) for path, verbs in made["paths"].items() for verb, one in verbs.items()]
        assert len({one["operationId"] for _, _, one in operations}) == len(operations) > 14
        async with httpx2.AsyncClient(timeout=60) as client:
            for path, verb, _ in operations:
                found = await client.request(verb.upper(), rig.url + path.replace("{model}", "toy"))
                assert (found.status_code != 404) and found.status_code < 500, path
        for one in references(made):
            assert one.removeprefix("#/components/schemas/") in made["components"]["schemas"]
        chat = {"$ref": "#/components/schemas/ChatRequest", "components": made["components"]}
        jsonschema.validate({"model": "m", "messages": [{"role": "user", "content": "x"}]}, chat)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"model": "m", "messages": "x"}, chat)
        assert json.dumps(made).count("/v1/models/{model}") == 1
