"""Fetches the file of an image by its URL, over https. Decodes nothing. Call it in a child process (`fetch_child`).

A name is resolved once. Every address that comes must be public, and one of these is dialled: a second answer of the
resolver could not redirect the call. Certificates are verified for the name. The environment's proxies are not used.
"""

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Collection
from typing import Protocol
from urllib.parse import urljoin

from sluice_server.services.media.urls import ImageUrl, is_public, read_url

MAX_HOPS = 3
PIECE_BYTES = 64 << 10
_MOVED = (301, 302, 303, 307, 308)
_REFUSED = "has an address that is not public, which is not dialled"


class FetchError(Exception):
    """An image is not fetched; the text says why, and follows the name of the field."""


class Network(Protocol):
    """How names are resolved and connections made; another one in tests."""

    def resolve(self, host: str, port: int) -> list[str]:
        """Returns all addresses of a host. Raises OSError."""

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Returns a connection. Raises OSError."""


class Internet:
    """The network of this machine."""

    def resolve(self, host: str, port: int) -> list[str]:
        """Returns all addresses of a host. Raises OSError."""
        return [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Returns a connection. Raises OSError."""
        return socket.create_connection((address, port), timeout_s)


class Fetcher:
    """Fetches files from some hosts, each of `max_bytes` at most and within `seconds`, redirects included."""

    def __init__(
        self,
        hosts: Collection[str],
        max_bytes: int,
        seconds: float,
        network: Network | None = None,
        context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._network = network or Internet()
        self._context = context or ssl.create_default_context()
        self._clock = clock

    def fetch(self, url: str) -> bytes:
        """Returns the file. Raises FetchError."""
        end_s = self._clock() + self._seconds
        first = target = self._read(url)
        for _ in range(1 + MAX_HOPS):
            try:
                found = self._ask(target, end_s)
            except TimeoutError:
                raise FetchError(f"was not fetched within {self._seconds:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise FetchError(f"cannot be fetched: {type(error).__name__}") from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
            target = self._read(url)
            if target.port != first.port:
                raise FetchError("redirects to another port, which is not followed")
        raise FetchError(f"redirects more than {MAX_HOPS} times")

    def _read(self, url: str) -> ImageUrl:
        try:
            return read_url(url, self._hosts)
        except ValueError as error:
            raise FetchError(str(error)) from None

    def _ask(self, target: ImageUrl, end_s: float) -> bytes | str:
        """Returns the file, or the address that a redirect names."""
        with (
            self._connection(target, end_s) as raw,
            self._context.wrap_socket(raw, server_hostname=target.host) as secured,
        ):
            connection = http.client.HTTPSConnection(target.host, target.port)
            connection.sock = secured  # it dials nothing itself
            connection.request("GET", target.path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            secured.settimeout(self._left(end_s))
            with connection.getresponse() as answer:
                return self._answer(answer, secured, end_s)

    def _connection(self, target: ImageUrl, end_s: float) -> socket.socket:
        addresses = list(dict.fromkeys(self._network.resolve(target.host, target.port)))
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError(_REFUSED)
        for address in addresses[:-1]:
            try:
                return self._network.connect(address, target.port, self._left(end_s))
            except OSError:
                continue
        return self._network.connect(addresses[-1], target.port, self._left(end_s))

    def _answer(self, answer: http.client.HTTPResponse, secured: ssl.SSLSocket, end_s: float) -> bytes | str:
        if answer.status in _MOVED and answer.headers.get("Location"):
            return str(answer.headers["Location"])
        if answer.status != http.client.OK:
            raise FetchError(f"is answered with status {answer.status}")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise FetchError("is answered in a compressed form that was not asked for")
        if (answer.length or 0) > self._max_bytes:
            raise FetchError(self._too_large())
        data = bytearray()
        while True:
            secured.settimeout(self._left(end_s))
            piece = answer.read1(PIECE_BYTES)
            if not piece:
                break
            data += piece
            if len(data) > self._max_bytes:
                raise FetchError(self._too_large())
        if answer.length:
            raise FetchError("ends before all of it has come")
        return bytes(data)

    def _left(self, end_s: float) -> float:
        """Returns the seconds that are left. Raises TimeoutError when none are."""
        left = end_s - self._clock()
        if left <= 0:
            raise TimeoutError
        return left

    def _too_large(self) -> str:
        return f"has more than {self._max_bytes} bytes"
