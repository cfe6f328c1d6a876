"""CURVE on the ring's TCP sockets: only peers with a listed key can connect."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from sluice_server.engine.errors import ServiceError
from sluice_server.services.messages.messages import Cancel, Envelope, Message
from sluice_server.services.ring.keys import load_keys, make_keys
from sluice_server.services.ring.sockets import Inbox, Outbox, Peer

LIMIT = 1 << 20


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def refusal(socket: "zmq.Socket[bytes]") -> int:
    """Waits for the end of the handshake of a socket that has begun to connect."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert monitor.poll(10_000), "no handshake"
    event = int(recv_monitor_message(monitor)["event"])
    socket.disable_monitor()
    monitor.close()
    return event


async def test_only_listed_keys_get_in(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path, unused_tcp_port: int
) -> None:
    assert len(make_keys(tmp_path / "ring", ["engine-0", "tokenizer-0"])) == 4
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    engine, tokenizer = (load_keys(str(tmp_path / "ring"), name) for name in ("engine-0", "tokenizer-0"))
    assert engine is not None and tokenizer is not None
    guard = engine.guard(context)
    inbox = Inbox(context, address, LIMIT, engine)

    with context.socket(zmq.PUSH) as stranger:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = engine.public
        stranger.connect(address)
        assert refusal(stranger) == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    outbox = Outbox(context, Peer("engine-0", address), "tokenizer-0", 1, LIMIT, tokenizer)
    wanted = Cancel(Envelope("0" * 32, "gateway-0"))
    outbox.put(wanted)
    came: list[Message] = []
    async with asyncio.timeout(10):
        while not came:
            outbox.flush()
            came += inbox.drain()
            await asyncio.sleep(0)
    assert came == [wanted]
    inbox.close()
    outbox.close()
    guard.stop()


def test_keys_are_private_and_made_once(tmp_path: Path) -> None:
    first = make_keys(tmp_path, ["engine-0"])
    secret = tmp_path / "engine-0.key_secret"
    assert secret in first and secret.stat().st_mode & 0o077 == 0
    before = secret.read_bytes()
    assert make_keys(tmp_path, ["engine-0"]) == [] and secret.read_bytes() == before


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    assert load_keys("", "engine-0") is None
    with pytest.raises(ServiceError, match=r"engine-0\.key_secret"):
        load_keys(str(tmp_path), "engine-0")
    make_keys(tmp_path, ["engine-0"])
    keys = load_keys(str(tmp_path), "engine-0")
    assert keys is not None
    with pytest.raises(ServiceError, match=r"gateway-0\.key "):
        keys.of_peer("gateway-0")
    (tmp_path / "engine-0.key_secret").write_text("garbage")
    with pytest.raises(ServiceError, match="sluice keys"):
        load_keys(str(tmp_path), "engine-0")
    zmq.auth.create_certificates(tmp_path, "public-only")
    (tmp_path / "public-only.key").rename(tmp_path / "public-only.key_secret")
    with pytest.raises(ServiceError, match="no secret key"):
        load_keys(str(tmp_path), "public-only")
