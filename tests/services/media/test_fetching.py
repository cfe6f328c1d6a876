"""Fetching an image: over sockets of this machine that stand for public addresses, which names resolve to here."""

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sluice_server.services.media.fetching import Fetcher, FetchError

HOST, OTHER = "pictures.example", "other.example"
PUBLIC, PRIVATE = "93.184.215.14", "10.0.0.1"
OK = b"HTTP/1.1 200 OK\r\n"


class LocalNetwork:
    """Names as a test says; every public address leads to one server of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: dict[str, list[list[str]]] = {HOST: [[PUBLIC]], OTHER: [[PUBLIC]]}
        self.num_resolved = 0
        self.dialled: list[tuple[str, int]] = []

    def resolve(self, host: str, port: int) -> list[str]:
        """The next answer for a name; the last one stays."""
        self.num_resolved += 1
        answers = self.answers[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """A connection to the server."""
        self.dialled.append((address, port))
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS of a server for both names, and of a client that trusts it."""
    path: Path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.DNSName(HOST), x509.DNSName(OTHER)])
    signed = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + signed.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cafile=str(path))


@contextlib.contextmanager
def serving(context: ssl.SSLContext, answers: Callable[[bytes], bytes]) -> Iterator[tuple[LocalNetwork, list[bytes]]]:
    """A server that answers each request with bytes, and then closes the connection."""
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    taken, _ = listening.accept()
                except OSError:
                    return
                with taken, contextlib.suppress(OSError), context.wrap_socket(taken, server_side=True) as secured:
                    heads.append(secured.recv(65536))
                    secured.sendall(answers(heads[-1]))
                    secured.unwrap()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield LocalNetwork(listening.getsockname()[1]), heads
        finally:
            listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def fetcher(network: LocalNetwork, context: ssl.SSLContext, *, seconds: float = 5.0) -> Fetcher:
    return Fetcher({HOST, OTHER, f"{HOST}:8443"}, 1000, seconds, network, context)


def refused(fetching: Fetcher, url: str) -> str:
    with pytest.raises(FetchError) as caught:
        fetching.fetch(url)
    return str(caught.value)


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


def test_a_file_is_fetched_from_the_address_that_was_checked(contexts: Contexts) -> None:
    for body in (
        b"content-length: 3\r\n\r\nabc",
        b"\r\nabc",
        b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ):
        with serving(contexts[0], lambda _, body=body: OK + body) as (network, heads):  # type: ignore[misc] # bound
            network.answers[HOST] = [[PUBLIC], [PRIVATE]]  # a second answer would be another one
            assert fetcher(network, contexts[1]).fetch(f"https://{HOST}/a?b=c") == b"abc"
        assert network.dialled == [(PUBLIC, 443)] and network.num_resolved == 1
        assert heads[0].startswith(b"GET /a?b=c HTTP/1.1\r\n") and f"Host: {HOST}\r\n".encode() in heads[0]


@pytest.mark.parametrize("answer", [[PRIVATE], [PUBLIC, PRIVATE], ["::ffff:127.0.0.1"], ["169.254.169.254"], []])
def test_a_name_with_one_answer_that_is_not_public_is_never_dialled(contexts: Contexts, answer: list[str]) -> None:
    with serving(contexts[0], lambda _: OK + b"\r\nabc") as (network, heads):
        network.answers[HOST] = [answer]
        assert "not public" in refused(fetcher(network, contexts[1]), f"https://{HOST}/a")
    assert not heads and not network.dialled


def test_redirects_are_judged_like_the_first_url(contexts: Contexts) -> None:
    places = {b"/1": f"https://{OTHER}/2", b"/2": "/3", b"/3": ""}
    bad = {
        b"/private": ("https://inner.example/", "--media-from"),
        b"/plain": (f"http://{HOST}/", "scheme 'http'"),
        b"/port": (f"https://{HOST}:8443/", "another port"),
        b"/file": ("file:///etc/passwd", "scheme 'file'"),
        b"/loop": ("/loop", "more than 3 times"),
    }

    def answer(head: bytes) -> bytes:
        path = head.split()[1]
        to = places.get(path, bad.get(path, ("", ""))[0])
        return f"HTTP/1.1 302 Found\r\nlocation: {to}\r\n\r\n".encode() if to else OK + b"\r\nabc"

    with serving(contexts[0], answer) as (network, heads):
        assert fetcher(network, contexts[1]).fetch(f"https://{HOST}/1") == b"abc"
        assert len(heads) == 3
        for path, (_, says) in bad.items():
            assert says in refused(fetcher(network, contexts[1]), f"https://{HOST}{path.decode()}")
        network.answers[OTHER] = [[PRIVATE]]
        num = len(network.dialled)
        assert "not public" in refused(fetcher(network, contexts[1]), f"https://{HOST}/1")
        assert len(network.dialled) == num + 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (OK + b"content-length: 1001\r\n\r\n", "more than 1000 bytes"),
        (OK + b"\r\n" + b"a" * 1001, "more than 1000 bytes"),
        (OK + b"content-length: 9\r\n\r\nabc", "ends before"),
        (OK + b"content-encoding: gzip\r\n\r\nabc", "compressed"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "status 302"),
        (b"nonsense", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_an_answer_that_is_no_file_is_refused(contexts: Contexts, answer: bytes, says: str) -> None:
    with serving(contexts[0], lambda _: answer) as (network, _):
        assert says in refused(fetcher(network, contexts[1]), f"https://{HOST}/a")


def test_a_certificate_is_verified(contexts: Contexts) -> None:
    with serving(contexts[0], lambda _: OK + b"\r\nabc") as (network, heads):
        untrusting = Fetcher({HOST}, 1000, 5.0, network)
        assert "SSLCertVerificationError" in refused(untrusting, f"https://{HOST}/a")
        network.answers["third.example"] = [[PUBLIC]]
        other = Fetcher({"third.example"}, 1000, 5.0, network, contexts[1])
        assert "SSLCertVerificationError" in refused(other, "https://third.example/a")
    assert not heads


def test_the_time_is_for_all_of_it(contexts: Contexts) -> None:
    now = [0.0]

    def late(head: bytes) -> bytes:
        now[0] = 6.0  # between two pieces
        return OK + b"\r\nabc"

    with serving(contexts[0], late) as (network, _):
        slow = Fetcher({HOST}, 1000, 5.0, network, contexts[1], lambda: now[0])
        assert "within 5 s" in refused(slow, f"https://{HOST}/a")
