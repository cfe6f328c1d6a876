"""A planned restart behind a gateway: new requests wait for it, and are refused if it does not succeed."""

import asyncio
import dataclasses

import grpc
import pytest

from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.processes import Role
from tests.services.gateway.fake_ring import Rig, generation, is_warm_up, running, settings, unary_request

ONE = settings(probe_timeout_s=60.0)


async def answered(rig: Rig) -> str:
    return str((await rig.stub.Generate(unary_request())).outputs[0].text)


async def waiting(rig: Rig) -> "asyncio.Task[str]":
    """A call that the gateway has admitted and not sent."""
    call = asyncio.create_task(answered(rig))
    await rig.ring.until(lambda: rig.lane.manager.num_open == 1)
    assert not rig.ring.submits
    return call


@pytest.mark.parametrize("lost", ["t0", "e0", "d0"])
async def test_new_requests_wait_for_a_planned_restart(lost: str) -> None:
    async with running(ONE) as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        rig.ring.silent.add(lost)
        rig.lane.lost({lost}, planned=True)
        assert rig.gateway.is_serving
        call = await waiting(rig)
        rig.ring.silent.clear()
        assert await call == "ab"
        assert await answered(rig) == "ab"  # sent at once: nothing is held any more
        assert [submit.envelope.attempt for submit in rig.ring.submits] == [1, 0]


@pytest.mark.parametrize("lost", ["t0", "d0"])
async def test_the_new_process_of_a_planned_restart_is_no_other_loss(lost: str) -> None:
    async with running(ONE) as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        rig.ring.silent.add(lost)
        rig.lane.lost({lost}, planned=True)
        rig.ring.emitted.clear()
        rig.ring.epochs[lost] = 2
        rig.ring.silent.clear()
        await rig.ring.until(lambda: any(isinstance(one, Submit) and is_warm_up(one) for one in rig.ring.emitted))
        assert rig.gateway.is_serving and not rig.lane.manager.engines.is_any_serving
        assert await answered(rig) == "ab"


async def test_a_request_that_is_cancelled_while_it_waits_is_never_sent() -> None:
    async with running(ONE) as rig:
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"}, planned=True)
        call = await waiting(rig)
        call.cancel()
        await rig.ring.until(lambda: not rig.lane.manager.num_open)
        rig.ring.silent.clear()
        await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
        assert not rig.ring.submits


async def test_a_loss_that_was_not_planned_shuts_the_door_and_keeps_those_that_wait() -> None:
    async with running(ONE) as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"}, planned=True)
        call = await waiting(rig)
        rig.lane.lost({"e0"})  # its next process ended, too
        assert not rig.gateway.is_serving
        rig.ring.silent.clear()
        assert await call == "ab"


async def test_those_that_wait_too_long_are_refused() -> None:
    async with running(dataclasses.replace(ONE, recovery_timeout_s=0.2)) as rig:
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"}, planned=True)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await answered(rig)
        assert found.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not rig.gateway.is_serving


async def test_those_that_wait_while_a_new_revision_comes_are_refused() -> None:
    """They were told the old revision, and may be tried again."""
    async with running(ONE) as rig:
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"}, planned=True)
        call = await waiting(rig)
        rig.ring.of_roles[Role.TOKENIZER] = "r2"
        rig.ring.silent.clear()
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call
        assert found.value.code() is grpc.StatusCode.UNAVAILABLE
