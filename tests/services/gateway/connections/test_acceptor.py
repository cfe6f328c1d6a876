import asyncio

import grpc
import pytest

from sluice_server.services.gateway.connections import acceptor
from sluice_server.services.gateway.connections.acceptor import MISSING
from sluice_server.services.gateway.connections.floods import FloodGuard
from tests.services.gateway.fake_ring import generation, running, stream_request, unary_request


def test_the_installed_grpc_has_the_parts_that_it_needs() -> None:
    assert MISSING == []


async def test_without_them_a_stock_server_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "MISSING", ["_handle_rpc"])
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"
    assert "has no _handle_rpc" in caplog.text


async def test_many_calls_of_many_methods_at_once() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        unary = [rig.stub.Generate(unary_request()) for _ in range(200)]
        streams = [rig.stub.StreamGenerate(stream_request()) for _ in range(200)]
        nothing: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
            rig.channel.unary_unary(f"/sluice.v1.InferenceService/None{i}") for i in range(50)
        ]
        absent = [call(b"") for call in nothing]
        assert [answer.outputs[0].text for answer in await asyncio.gather(*unary)] == ["a"] * 200
        ends = [[event async for event in call][-1].WhichOneof("event") for call in streams]
        assert ends == ["finished"] * 200
        assert {await call.code() for call in absent} == {grpc.StatusCode.UNIMPLEMENTED}


async def test_a_stop_ends_what_runs_and_what_waits_to_be_taken() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
    assert await call.code() == grpc.StatusCode.UNAVAILABLE
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert "gRPC accept" not in left


async def test_calls_that_their_clients_give_up_are_told_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.Event()
    monkeypatch.setattr(FloodGuard, "given_up", lambda floods: told.set())
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        assert (await rig.stub.Generate(unary_request())).outputs[0].text == "a"
        assert not told.is_set()
    async with running() as rig:
        rig.ring.script = lambda submit: None
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        call.cancel()
        async with asyncio.timeout(20):
            await told.wait()
