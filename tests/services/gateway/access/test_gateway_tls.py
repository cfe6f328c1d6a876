import contextlib
import logging
import random
import socket
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.tls_files import TlsFiles, files_of
from sluice_server.services.gateway.gateway import Gateway
from tests.services.certificates import Authority, Pair, written
from tests.services.gateway.fake_ring import running, settings, stream_request, unary_request


async def ask(port: int, authority: bytes, client: Pair | None = None) -> str:
    """The gateway's id, requested over a fresh TLS connection."""
    pair = (client.key, client.certificate) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(authority, *pair)
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        stub: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)
        return (await stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)).gateway_id


async def refused(port: int, authority: bytes, client: Pair | None = None) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(port, authority, client)
    return caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_serves_new_connections_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority("old"), Authority("new")
    files = written(tmp_path, old)
    async with running(settings(tls=files), wait=False) as rig:
        assert await ask(rig.port, old.pem) == "g0"
        new.issue("server").write(tmp_path)
        assert await ask(rig.port, new.pem) == "g0"
        assert await refused(rig.port, old.pem)
        garbage = tmp_path / "garbage"
        garbage.write_text("garbage")
        garbage.rename(files.certificate)  # in one step: a channel above may connect again at any time
        with caplog.at_level(logging.ERROR):
            assert await ask(rig.port, new.pem) == "g0"
            assert await ask(rig.port, new.pem) == "g0"
        assert [one.getMessage().count("stays in force") for one in caplog.records] == [1]


async def test_a_mutual_server_asks_for_a_certificate_of_its_authority(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    async with running(settings(tls=written(tmp_path, ours, mutual=True)), wait=False) as rig:
        assert await ask(rig.port, ours.pem, ours.issue("client")) == "g0"
        assert await refused(rig.port, ours.pem)
        assert await refused(rig.port, ours.pem, theirs.issue("client"))
        assert await refused(rig.port, ours.pem, ours.issue("client", from_h=-9, to_h=-1))


def faulty(folder: Path, fault: str) -> TlsFiles:
    authority = Authority()
    files = written(folder, authority, mutual=True)
    match fault:
        case "expired":
            authority.issue("server", from_h=-9, to_h=-1).write(folder)
        case "not yet":
            authority.issue("server", from_h=9, to_h=20).write(folder)
        case "wrong key":
            files.key.write_bytes(authority.issue("other").key)
        case "garbage":
            files.certificate.write_bytes(b"\x00garbage\xff")
        case "missing":
            files.key.unlink()
        case "folder":
            return TlsFiles(files.certificate, files.key, folder)
        case "authority":
            assert files.client_ca is not None
            files.client_ca.write_text("no certificate")
    return files


@pytest.mark.parametrize(
    ("fault", "file", "reason"),
    [
        ("expired", "server.pem", "expired"),
        ("not yet", "server.pem", "not yet valid"),
        ("wrong key", "server.key", "is not the key of"),
        ("garbage", "server.pem", "are not a PEM certificate"),
        ("missing", "server.key", "No such file"),
        ("folder", "", "Is a directory"),
        ("authority", "ca.pem", "no PEM certificate"),
    ],
)
async def test_files_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, fault: str, file: str, reason: str
) -> None:
    gateway = Gateway(settings(tls=faulty(tmp_path, fault)))
    with pytest.raises(ServiceError, match=reason) as caught:
        await gateway.start()
    assert str(tmp_path / file) in caught.value.message


@pytest.mark.parametrize("half", [("c", "", ""), ("", "k", ""), ("", "", "a"), ("", "k", "a")])
def test_half_a_pair_is_refused(half: tuple[str, str, str]) -> None:
    with pytest.raises(ServiceError, match="is needed with"):
        files_of(*half)


async def test_plaintext_for_other_hosts_must_be_asked_for() -> None:
    with pytest.raises(ServiceError, match="--insecure"):
        await Gateway(settings(listen="0.0.0.0:0")).start()
    async with running(settings(listen="0.0.0.0:0", insecure=True), wait=False) as rig:
        assert (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).gateway_id == "g0"


async def test_a_message_or_metadata_beyond_its_limit_is_refused_and_the_next_call_is_served() -> None:
    async with running(settings(max_receive_bytes=1 << 16)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request(text="x" * (1 << 16)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        info = control_pb2.GetServerInfoRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.control.GetServerInfo(info, metadata=(("x-much", "y" * 20_000),))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await rig.control.GetServerInfo(info)).gateway_id == "g0"


async def test_streams_of_one_connection_beyond_the_limit_wait_their_turn() -> None:
    async with running(settings(max_concurrent_streams=2)) as rig:
        streams = [rig.stub.StreamGenerate(stream_request()) for _ in range(2)]
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        streams.append(rig.stub.StreamGenerate(stream_request()))  # only now: the three do not leave in a fixed order
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=0.2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        streams[0].cancel()
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)


async def test_noise_and_silence_before_the_handshake_disturb_no_client(tmp_path: Path) -> None:
    authority = Authority()
    async with running(settings(tls=written(tmp_path, authority)), wait=False) as rig:
        address = ("127.0.0.1", rig.port)
        with contextlib.ExitStack() as stack:
            for at in range(60):
                guest = stack.enter_context(socket.create_connection(address))
                if at % 3:
                    guest.sendall(random.Random(at).randbytes(200) if at % 3 == 1 else b"PRI * HTTP/2.0\r\n\r\n")
            assert await ask(rig.port, authority.pem) == "g0"
            plain = inference_pb2.CancelGenerationRequest(generation_id="x")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.stub.CancelGeneration(plain)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_unix_socket_serves_this_host(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/door"
    async with running(settings(listen=listen), wait=False), grpc.aio.insecure_channel(listen) as channel:
        stub: control_pb2_grpc.ControlServiceAsyncStub = control_pb2_grpc.ControlServiceStub(channel)
        assert (await stub.GetServerInfo(control_pb2.GetServerInfoRequest())).gateway_id == "g0"


async def test_reflection_can_be_turned_off() -> None:
    async with running(settings(reflection=False), wait=False) as rig:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = rig.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(iter([b""])).read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
