import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import control_pb2, inference_pb2, inference_pb2_grpc

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.identity import digest_of, new_key, read_access
from sluice_server.services.gateway.calls import guard, server
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.process.watched import WatchedFile
from tests.services.certificates import Authority, written
from tests.services.gateway.fake_ring import FakeRing, Rig, generation, running, settings, stream_request, unary_request

REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def entry(key: str, tenant: str, *scopes: str) -> str:
    return f'[[keys]]\nsha256 = "{digest_of(key).hex()}"\ntenant = "{tenant}"\nscopes = {list(scopes)}\n'


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:  # noqa: ANN401 # of any kind and method
    """Code and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    status = status_pb2.Status()
    metadata = {key: value for key, value in caught.value.trailing_metadata() or ()}
    status.ParseFromString(bytes(metadata["grpc-status-details-bin"]))  # type: ignore[arg-type] # -bin values are bytes
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return caught.value.code(), info.reason


UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_INVALID")
NOT_ALLOWED = (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")


def test_the_table_has_every_method_and_no_other() -> None:
    real = {f"/{one.full_name}/{m.name}" for one in (server.INFERENCE, server.CONTROL) for m in one.methods}
    assert real == {name for name in guard.SCOPES if name.startswith("/sluice.v1.")}


async def test_scopes_per_method(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(entry("g", "acme", "generate") + entry("c", "ops", "control") + entry("a", "ops", "admin"))
    async with running(settings(access_file=file)) as rig:
        info, load = control_pb2.GetServerInfoRequest(), control_pb2.GetLoadRequest()
        model = control_pb2.LoadModelRequest()
        for key in "gca":
            assert (await rig.control.GetServerInfo(info, metadata=bearer(key))).gateway_id == "g0"
        await rig.control.GetLoad(load, metadata=bearer("c"))
        assert await status_of(rig.control.GetLoad(load, metadata=bearer("g"))) == NOT_ALLOWED
        assert await status_of(rig.stub.Generate(unary_request(), metadata=bearer("c"))) == NOT_ALLOWED
        assert await status_of(rig.control.LoadModel(model, metadata=bearer("c"))) == NOT_ALLOWED
        invalid = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert await status_of(rig.control.LoadModel(model, metadata=bearer("a"))) == invalid


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong"),
        bearer(""),
        bearer("k" * 300),
        bearer("k") + bearer("k"),
        (("authorization", "k"),),
        (("authorization", "Basic k"),),
        (("x-tenant", "acme"), ("authorization", "Bearer acme")),
    ],
)
async def test_who_is_not_known_gets_nowhere(tmp_path: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    file = tmp_path / "access.toml"
    file.write_text(entry("k", "acme", "generate", "control", "admin"))
    async with running(settings(access_file=file)) as rig:
        reflection: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = rig.channel.stream_stream(REFLECTION)
        for call in (
            rig.stub.Generate(unary_request(), metadata=metadata),
            rig.stub.StreamGenerate(stream_request(), metadata=metadata),
            rig.stub.Converse(iter([]), metadata=metadata),
            rig.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id="x"), metadata=metadata),
            rig.control.ListModels(control_pb2.ListModelsRequest(), metadata=metadata),
            reflection(iter([]), metadata=metadata),
        ):
            assert await status_of(call) == UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(rig.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        assert not rig.ring.submits


async def test_the_key_chooses_the_tenant_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(entry("one", "acme", "generate") + entry("two", "other", "generate"))
    async with running(settings(access_file=file)) as rig:
        stream = rig.stub.StreamGenerate(stream_request(), metadata=(*bearer("one"), ("x-sluice-tenant", "other")))
        submit = await rig.ring.next_submit()
        assert submit.envelope.tenant == "acme"
        cancel = inference_pb2.CancelGenerationRequest(generation_id=submit.envelope.request_id)
        stolen = await status_of(rig.stub.CancelGeneration(cancel, metadata=bearer("two")))
        assert stolen == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")
        found = await rig.stub.CancelGeneration(cancel, metadata=bearer("one"))
        assert found.state == inference_pb2.GENERATION_STATE_CANCELLED
        stream.cancel()


async def test_a_certificate_names_its_tenant(tmp_path: Path) -> None:
    authority = Authority()
    file = tmp_path / "access.toml"
    file.write_text('[[certificates]]\nname = "batch.acme"\ntenant = "acme"\nscopes = ["generate"]\n')
    chosen = settings(tls=written(tmp_path, authority, mutual=True), access_file=file)
    async with running(chosen) as rig:
        for name, tenant in (("batch.acme", "acme"), ("stranger", "")):
            pair = authority.issue(name)
            credentials = grpc.ssl_channel_credentials(authority.pem, pair.key, pair.certificate)
            async with grpc.aio.secure_channel(f"127.0.0.1:{rig.port}", credentials) as channel:
                stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(unary_request())
                if not tenant:
                    assert await status_of(call) == UNAUTHENTICATED
                    continue
                submit = await rig.ring.next_submit()
                assert submit.envelope.tenant == tenant
                rig.ring.play(*generation(submit, ["done"]))
                assert (await call).outputs[0].text == "done"


async def test_the_file_is_read_again_and_a_bad_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "access.toml", [0.0]
    file.write_text(entry("old", "acme", "generate"))
    ring = FakeRing()
    chosen = settings(access_file=file)
    gateway = Gateway(chosen, clock=lambda: clock[0])
    ring.opened(gateway, chosen)
    port = await gateway.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[control_pb2.GetServerInfoRequest, bytes] = channel.unary_unary(
            "/sluice.v1.ControlService/GetServerInfo",
            request_serializer=control_pb2.GetServerInfoRequest.SerializeToString,
        )

        async def may(key: str) -> bool:
            clock[0] += 2.0
            try:
                await call(control_pb2.GetServerInfoRequest(), metadata=bearer(key))
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                return False
            return True

        assert (await may("old"), await may("new")) == (True, False)
        file.write_text(entry("new", "acme", "generate") + "\n")
        assert (await may("old"), await may("new")) == (False, True)
        with caplog.at_level(logging.ERROR):
            file.write_text("garbage")
            assert (await may("old"), await may("new")) == (False, True)
        assert any("stays in force" in one.getMessage() for one in caplog.records)
    await gateway.stop(0.0)


async def test_a_tenant_beyond_its_quota_is_refused_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    limits = "[tenants.acme]\nmax_concurrent = 1\n"
    file.write_text(limits + entry("one", "acme", "generate") + entry("two", "other", "generate"))
    async with running(settings(access_file=file)) as rig:
        first = rig.stub.StreamGenerate(stream_request(), metadata=bearer("one"))
        await rig.ring.next_submit()
        refused = await status_of(rig.stub.Generate(unary_request(), metadata=bearer("one")))
        assert refused == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["x"]))
        assert (await rig.stub.Generate(unary_request(), metadata=bearer("two"))).outputs[0].text == "x"
        first.cancel()
        await ended(rig)
        assert (await rig.stub.Generate(unary_request(), metadata=bearer("one"))).outputs[0].text == "x"


async def ended(rig: Rig) -> None:
    """Waits until no request is open."""
    async with asyncio.timeout(10):
        await rig.ring.until(lambda: rig.ring.cancels)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\x00\x01garbage", "is not TOML"),
        ("a = " + "[" * 100_000, "nests its values too deeply"),
        ("a = " + "{b = " * 100_000, "nests its values too deeply"),
        ("a = " + "9" * 5_000, "is not TOML"),
        ("[[keys]]\nsha256 = 'short'\ntenant = 't'\nscopes = ['generate']", r"keys\[0\].sha256 is not 64 hex digits"),
        ("[[keys]]\nsha256 = 'x'\ntenant = 't'\nscopes = ['root']", "root"),
        ("[[keys]]\nsha256 = 'x'\ntenant = 't'", "scopes"),
        ("[[keys]]\nsecret = 'x'", "secret"),
        ("[tenants.a]\nmax_concurrent = 0", "at least 1"),
        ("[[certificates]]\nname = 'n'\ntenant = ''\nscopes = ['admin']", "empty tenant"),
        (None, "No such file"),
    ],
)
def test_an_access_file_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    file = tmp_path / "access.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ServiceError, match=reason) as caught:
        Gateway(settings(access_file=file))
    assert str(file) in caught.value.message


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5_000], ids=["nested", "digits"])
def test_a_file_that_becomes_unusable_changes_nothing_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "access.toml"
    file.write_text(entry("one", "t", "generate"))
    access = WatchedFile((file,), lambda: read_access(file))
    file.write_text(text)
    assert [access.refresh() for _ in range(3)] == [False] * 3
    assert access.value.by_key("one") is not None
    assert [record.getMessage().count(str(file)) for record in caplog.records] == [1]


def test_keys_are_long_and_their_hash_is_what_is_known(tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "access.toml"
    file.write_text(entry(key, "t", "generate"))
    assert len(key) > 40 and key not in file.read_text()
    access = read_access(file)
    assert access.by_key(key) is not None and access.by_key(key[:-1]) is None
    assert access.by_key(digest_of(key).hex()) is None
