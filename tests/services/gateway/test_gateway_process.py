"""A gateway told that the service ends."""

import asyncio

import grpc
import pytest

from services.gateway.process import end_at_once
from tests.services.gateway.fake_ring import running, stream_request, text_of


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
