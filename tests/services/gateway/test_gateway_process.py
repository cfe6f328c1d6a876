"""A gateway process: the number of connections it may hold, what its start leaves, and its end with the service."""

import asyncio
import os
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway import lanes as lanes_module
from sluice_server.services.gateway import process as module
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.lanes import GatewayLanes
from sluice_server.services.gateway.opening import OTHER_FILES, most_connections
from sluice_server.services.gateway.process import end_at_once
from sluice_server.services.process.joining import Common
from sluice_server.services.process.supervised import TABLE_CHANGED
from tests.services.gateway.fake_ring import running, stream_request, text_of


def test_connections_leave_files_for_what_else_a_gateway_does() -> None:
    assert most_connections(20_000) == 20_000 - OTHER_FILES
    assert most_connections(1024) == 1024 - OTHER_FILES
    assert most_connections(256) == 128
    assert most_connections(-1) == 1 << 20  # RLIM_INFINITY


async def test_a_service_that_gives_up_ends_streams_in_words() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        events = aiter(call)
        assert [(await anext(events)).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        stopping = asyncio.Event()
        end_at_once(rig.gateway, stopping)
        with pytest.raises(grpc.aio.AioRpcError, match="was lost; the request can be sent again") as ended:
            await anext(events)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE and stopping.is_set()
        assert not rig.gateway.is_serving


async def test_it_gives_back_pages_of_libraries_when_its_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stopping = asyncio.Event()
    stopping.set()

    async def start() -> None:
        done.append("started")

    async def nothing(grace_s: float = 0.0) -> None:
        pass

    monkeypatch.setattr(module, "give_back_library_pages", lambda: done.append("given back"))
    gateway, lanes = (
        SimpleNamespace(start=start, stop=nothing),
        SimpleNamespace(lost=None, follow=nothing, look_now=None),
    )
    common = cast(Common, SimpleNamespace(stopping=stopping))
    status = await module._serve(ServiceConfig(), common, cast(Gateway, gateway), cast(GatewayLanes, lanes))
    assert status == 0 and done == ["started", "given back"]


async def test_it_looks_at_the_table_of_models_when_its_supervisor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "LOOK_S", 1e6)
    common = cast(Common, SimpleNamespace(stopping=asyncio.Event()))
    looks: list[str] = []

    async def start() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), TABLE_CHANGED)

    async def look() -> None:
        looks.append("looked")
        common.stopping.set()

    async def stop(grace_s: float) -> None:
        looks.append("stopped")

    lanes = object.__new__(GatewayLanes)
    lanes._is_told_to_look, lanes._look = asyncio.Event(), look  # type: ignore[method-assign] # what `follow` uses
    gateway = cast(Gateway, SimpleNamespace(start=start, stop=stop))
    assert await module._serve(ServiceConfig(), common, gateway, lanes) == 0 and looks == ["looked", "stopped"]
