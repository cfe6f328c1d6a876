"""What goes round each exchange: request ids, hosts, origins, media types, the access log, a prefix of a proxy."""

import asyncio
import logging
from typing import Any

import httpx2
import pytest

from sluice_server.services.edge import exchange
from sluice_server.services.edge.exchange import is_allowed
from sluice_server.services.edge.settings import HttpSettings
from tests.services.edge.edge_rig import edge
from tests.services.edge.test_edge import HELLO, answering, raw

PAGE = "https://page.example"
ASK: dict[str, Any] = {"model": "toy", "messages": HELLO}
CHAT = "/v1/chat/completions"


async def test_every_answer_has_the_id_of_its_request() -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        answering(rig, "x")
        for path, status in (("/version", 200), ("/nowhere", 404), ("/v1/models/none", 404)):
            found = await client.get(rig.url + path, headers={"x-request-id": "mine-1"})
            assert (found.status_code, found.headers["x-request-id"]) == (status, "mine-1")
        for body in (ASK, {**ASK, "stream": True}):
            found = await client.post(rig.url + CHAT, json=body)
            assert len(found.headers["x-request-id"]) == 32 and found.status_code == 200


@pytest.mark.parametrize("given", [b"a b", b"x" * 129, "é".encode()])
async def test_an_id_that_is_none_is_refused_with_a_new_one(given: bytes) -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        found = await client.get(rig.url + "/version", headers={b"x-request-id": given})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "x-request-id")
        assert len(found.headers["x-request-id"]) == 32


async def test_a_body_that_is_no_json_by_its_header_is_refused() -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        answering(rig, "x")
        for headers in ({"content-type": "text/plain"}, {}, {"content-type": "multipart/form-data"}):
            found = await client.post(rig.url + CHAT, content=b"{}", headers=headers)
            assert (found.status_code, found.json()["error"]["param"]) == (415, "content-type")
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        found = await client.post(rig.url + CHAT, content=b"{}", headers=packed)
        assert (found.status_code, found.json()["error"]["param"]) == (415, "content-encoding")
        named = {"content-type": "Application/JSON; charset=utf-8"}
        found = await client.post(rig.url + "/tokenize", content=b"{}", headers=named)
        assert found.status_code == 400


async def test_pages_of_listed_origins_may_call() -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with edge(http=HttpSettings(allowed_origins=(PAGE,))) as rig, httpx2.AsyncClient(timeout=60) as client:
        found = await client.options(rig.url + CHAT, headers=asks)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, PAGE)
        assert found.headers["access-control-allow-headers"] == "authorization" and found.headers["x-request-id"]
        got = await client.get(rig.url + "/nowhere", headers={"origin": PAGE})
        assert (got.status_code, got.headers["access-control-allow-origin"]) == (404, PAGE)
        assert "x-request-id" in got.headers["access-control-expose-headers"]
        other = await client.get(rig.url + "/version", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        assert "access-control-allow-origin" not in (await client.options(rig.url + CHAT, headers=asks)).headers


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("api.example", True),
        ("API.example:8000", True),
        ("a.sub.example", True),
        ("sub.example", False),
        ("evil.example", False),
        ("api.example.evil.com", False),
        ("localhost:8000", True),
        ("page.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.0.2.1", True),
        ("", False),
    ],
)
def test_hosts(host: str, is_one: bool) -> None:
    assert is_allowed(host, ("api.example", "*.sub.example")) is is_one
    assert is_allowed(host, ("*",))


async def test_another_sites_name_is_misdirected() -> None:
    async with edge(http=HttpSettings(allowed_hosts=())) as rig:
        status, answer = await asyncio.to_thread(raw, rig.url, "GET /version")
        assert (status, b"x-request-id" in answer, b"--allowed-hosts" in answer) == (421, True, True)
        async with httpx2.AsyncClient(timeout=60) as client:
            assert (await client.get(rig.url + "/version")).status_code == 200


async def test_a_prefix_of_a_proxy_may_be_stripped_or_not() -> None:
    async with edge(http=HttpSettings(root_path="/llm")) as rig, httpx2.AsyncClient(timeout=60) as client:
        for path in ("/version", "/llm/version"):
            assert (await client.get(rig.url + path)).status_code == 200
        assert (await client.get(rig.url + "/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert (await client.get(rig.url + "/other/version")).status_code == 404


async def test_a_base_url_without_its_end_is_told_what_it_lacks() -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/tokenize", "/tokenize")):
            found = await client.post(rig.url + path, content=b"{}")
            assert found.status_code == 404 and f"; {meant} is a path: " in found.json()["error"]["message"]
        found = await client.post(rig.url + "/v1/v1/completions", content=b"{}")
        assert "; /v1/completions is a path: " in found.json()["error"]["message"]
        assert "/openapi.json lists" in (await client.get(rig.url + "/nowhere")).json()["error"]["message"]


async def test_the_log_of_requests_has_no_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with edge(http=HttpSettings(access_log=True)) as rig, httpx2.AsyncClient(timeout=60) as client:
        await client.get(rig.url + "/version?key=secret", headers={"x-request-id": "mine"})
    (line,) = [one for one in caplog.records if one.name == exchange.__name__]
    found = dict(vars(line)[exchange.ABOUT])
    assert found.pop("seconds") > 0
    assert found == {
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/version",  # without its query
        "status": 200,
        "http_request_id": "mine",
    }
