"""CURVE keys for the ring's TCP sockets: a directory with every process's public key and this process's secret key.

The files are ZeroMQ certificates, `<process id>.key` and `<process id>.key_secret`, as `sluice keys` writes them. The
public keys in the directory are also the list of processes that may connect.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from sluice_server.services.config import bad_setting


@dataclasses.dataclass(frozen=True, slots=True)
class RingKeys:
    """The key pair of one process, and the directory of the other processes' public keys."""

    directory: Path
    public: bytes
    secret: bytes

    def of_peer(self, peer: str) -> bytes:
        """Returns the public key of a peer. Raises ServiceError naming the file that is missing or broken."""
        return _load(self.directory / f"{peer}.key")[0]

    def secure_outbox(self, socket: "zmq.Socket[bytes]", peer: str) -> None:
        """Set up `socket` to authenticate with this process's key pair, and to accept `peer` only as its server."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.of_peer(peer)

    def secure_inbox(self, socket: "zmq.Socket[bytes]") -> None:
        """Set up `socket` as a CURVE server. Clients need its public key, and their own public key must be in the
        directory."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True

    def guard(self, context: "zmq.Context[zmq.Socket[bytes]]") -> ThreadAuthenticator:
        """Start the authenticator of connections to the inboxes of `context`. It must be stopped before the context
        ends."""
        guard = ThreadAuthenticator(context, log=logging.getLogger(__name__))
        guard.start()
        guard.configure_curve(domain="*", location=str(self.directory))
        return guard


def load_keys(directory: str, process_id: str) -> RingKeys | None:
    """Returns the keys of one process; None if `directory` is "". Raises ServiceError naming the file at fault."""
    if not directory:
        return None
    public, secret = _load(Path(directory) / f"{process_id}.key_secret")
    if secret is None:
        raise bad_setting("ring_keys", f"{process_id}.key_secret holds no secret key")
    return RingKeys(Path(directory), public, secret)


def make_keys(directory: Path, process_ids: Iterable[str]) -> list[Path]:
    """Write a key pair for each process that has none; returns the files written. Secret keys are readable by this
    user only."""
    written: list[Path] = []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        for process_id in process_ids:
            if not (directory / f"{process_id}.key_secret").exists():
                written += [Path(path) for path in zmq.auth.create_certificates(directory, process_id)]
    finally:
        os.umask(before)
    return written


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise bad_setting("ring_keys", f"cannot use {path} ({error}); `sluice keys` writes such files") from error
