"""A generation cancelled or resumed through another gateway than its own."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.services.gateway.calls.peers import PEER_KEY, TENANT_KEY, PeerGateways
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.calls.test_resume import detached, resume, told, until_detached
from tests.services.gateway.fake_ring import Rig, generation, public, running, settings, stream_request, text_of

CANCELLED = inference_pb2.GENERATION_STATE_CANCELLED


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # shorter than tmp_path: a socket's path has a limit
        yield Path(path)


@contextlib.asynccontextmanager
async def gateway(directory: Path, name: str, secret: str = "secret") -> AsyncIterator[Rig]:
    sockets = {one: str(directory / one) for one in ("g1", "g2")}
    chosen = settings(
        gateway_id=name,
        peers={one: f"unix:{path}" for one, path in sockets.items()},
        peer_socket=sockets[name],
        peer_secret=secret,
    )
    async with running(chosen) as rig:
        yield rig


def cancel(generation_id: str) -> inference_pb2.CancelGenerationRequest:
    return inference_pb2.CancelGenerationRequest(generation_id=generation_id)


async def test_a_cancel_reaches_the_owner(directory: Path) -> None:
    async with gateway(directory, "g1") as owner, gateway(directory, "g2") as other:
        call = owner.stub.StreamGenerate(stream_request())
        submit = await owner.ring.next_submit()
        assert PeerGateways("g1", {}, "").split(public(submit)) == (submit.envelope.request_id, "g1")
        answer = await other.stub.CancelGeneration(cancel(public(submit)))
        assert (answer.found, answer.state) == (inference_pb2.GENERATION_STATE_RUNNING, CANCELLED)
        assert owner.ring.cancels == [submit.envelope.request_id] and other.ring.cancels == []
        again = await other.stub.CancelGeneration(cancel(public(submit)))
        assert again.found == CANCELLED
        call.cancel()


async def test_a_resume_streams_from_the_owner(directory: Path) -> None:
    async with gateway(directory, "g1") as owner, gateway(directory, "g2") as other:
        call = owner.stub.StreamGenerate(stream_request(**detached()))
        submit = await owner.ring.next_submit()
        owner.ring.play(text_of(submit, 0, "a", first=True))
        events = aiter(call)
        assert [(await anext(events)).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        call.cancel()
        await until_detached(owner, submit)
        elsewhere = aiter(resume(other, public(submit), 0))
        assert [(await anext(elsewhere)).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        owner.ring.play(text_of(submit, 1, "b", last=True))
        assert await told(elsewhere) == [("delta", "2b"), ("output_finished", ""), ("finished", "")]


async def test_a_reader_lost_elsewhere_is_lost_to_the_owner(directory: Path) -> None:
    async with gateway(directory, "g1") as owner, gateway(directory, "g2") as other:
        owner.stub.StreamGenerate(stream_request(**detached()))
        submit = await owner.ring.next_submit()
        owner.ring.play(text_of(submit, 0, "a", first=True))
        call = resume(other, public(submit))
        events = aiter(call)
        await anext(events)
        call.cancel()
        await until_detached(owner, submit)


async def test_the_owners_refusal_is_told_as_it_is(directory: Path) -> None:
    async with gateway(directory, "g1") as owner, gateway(directory, "g2") as other:
        owner.ring.script = lambda submit: owner.ring.play(*generation(submit, ["a"]))
        await told(owner.stub.StreamGenerate(stream_request(**detached())))
        generation_id = public(owner.ring.submits[-1])
        error, reason = await failure(resume(other, generation_id, 5).read())
        assert (error.code(), reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        error, reason = await failure(other.stub.CancelGeneration(cancel("f" * 32 + ".g1")))
        assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")


async def test_an_owner_that_is_gone_or_unknown_is_not_found(directory: Path) -> None:
    async with gateway(directory, "g2") as rig:
        for owner in ("g1", "g9"):
            name = "f" * 32 + "." + owner
            for call in (rig.stub.CancelGeneration(cancel(name)), resume(rig, name).read()):
                error, reason = await failure(call)
                assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")


async def test_only_who_knows_the_secret_speaks_for_a_tenant(directory: Path, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text('[tenants.acme]\n[[keys]]\nsha256 = "' + "0" * 64 + '"\ntenant = "acme"\nscopes = ["generate"]\n')
    sockets = {"peer_socket": str(directory / "g1"), "peer_secret": "secret"}
    async with running(settings(access_file=access, **sockets)) as rig:
        request = cancel("f" * 32 + ".g0")
        for secret, expected in (("wrong", "UNAUTHENTICATED"), ("", "UNAUTHENTICATED"), ("secret", "NOT_FOUND")):
            metadata = ((PEER_KEY, secret), (TENANT_KEY, "acme"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.stub.CancelGeneration(request, metadata=metadata)
            assert caught.value.code().name == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
