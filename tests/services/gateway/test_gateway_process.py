"""A gateway process: the number of connections it may hold, and its end with the service."""

import asyncio

import grpc
import pytest

from sluice_server.services.gateway.opening import OTHER_FILES, most_connections
from sluice_server.services.gateway.process import end_at_once
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
