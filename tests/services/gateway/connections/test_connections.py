import contextlib
import select
import socket
from collections.abc import Iterator, Sequence

import pytest

from sluice_server.services.gateway.connections import connections
from sluice_server.services.gateway.connections.address_limiter import Peer
from sluice_server.services.gateway.connections.screen import Held
from tests.services.gateway.raw_http2 import END_HEADERS, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame

BEGIN = PREFACE + frame(SETTINGS, 0, 0)
RESET = frame(HEADERS, END_HEADERS, 1) + frame(RST_STREAM, 0, 1, b"1234")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


@contextlib.contextmanager
def connected(listening: socket.socket, data: bytes) -> Iterator[tuple[socket.socket, Peer, socket.socket]]:
    """A client that has sent something, its name, and the server's socket."""
    with socket.create_connection(listening.getsockname()) as client:
        client.sendall(data)
        with listening.accept()[0] as served:
            served.setblocking(False)  # else Python itself waits to be woken
            while waiting(served) < len(data):
                pass
            yield client, client.getsockname(), served


def waiting(served: socket.socket) -> int:
    with contextlib.suppress(BlockingIOError):
        return len(served.recv(1 << 16, socket.MSG_PEEK))
    return 0


def wakes(served: socket.socket) -> bool:
    """Whether the system wakes the reader of a socket."""
    return bool(select.select([served], [], [], 0.0)[0])


def look(port: int, go: Sequence[Peer] = (), over: Sequence[Peer] = ()) -> list[Held]:
    """The table of held connections, some of which go on and some are cut."""
    found: list[Held] = []

    def judge(told: Sequence[Held]) -> tuple[Sequence[Peer], Sequence[Peer]]:
        found[:] = told
        return go, over

    assert connections.screen(port, judge) == list(over)
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_connection_is_found_by_its_peer_and_cut(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = host == "::"  # a client of IPv4 is then told as ::ffff:127.0.0.1
    to = "127.0.0.1" if dual else host
    with (
        socket.create_server((host, 0), family=family, dualstack_ipv6=dual) as listening,
        socket.create_connection((to, listening.getsockname()[1])) as client,
        listening.accept()[0],
    ):
        client.sendall(b"x" * 1000)
        peer = client.getsockname()[:2]
        assert connections.cut([(to, 1)]) == 0
        assert connections.cut([peer]) == 1  # the server's end, and not the client's, which is also of this process
        client.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            assert client.recv(10) == b""


def test_what_new_connections_send_is_held_and_goes_on_or_ends_as_is_said(listening: socket.socket) -> None:
    port = port_of(listening)
    connections.hold(port)
    with (
        connected(listening, BEGIN) as (_, good, good_end),
        connected(listening, BEGIN + RESET) as (client, bad, bad_end),
    ):
        assert not wakes(good_end) and not wakes(bad_end)
        held = sorted(look(port, [good], [bad]), key=lambda one: one.num_resets)
        assert held == [Held(good, len(BEGIN), 0, 0), Held(bad, len(BEGIN + RESET), 1, 1)]
        assert wakes(good_end) and good_end.recv(1000) == BEGIN
        assert wakes(bad_end) and bad_end.recv(1000) == b""  # nothing of it is left to be read
        client.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            assert client.recv(10) == b""
        assert look(port) == []


def test_what_is_released_goes_on_and_what_comes_later_is_not_held(listening: socket.socket) -> None:
    port = port_of(listening)
    connections.hold(port)
    with connected(listening, BEGIN) as (_, _, first):
        assert not wakes(first)
        connections.release(port)
        assert wakes(first)
        with connected(listening, BEGIN) as (_, _, second):
            assert wakes(second)


def test_connections_that_were_there_before_and_those_to_other_ports_are_not_held(listening: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, connected(listening, BEGIN) as (_, _, before):
        connections.hold(port_of(listening))
        with connected(other, BEGIN) as (_, _, elsewhere):
            assert wakes(before) and wakes(elsewhere)
            assert look(port_of(listening)) == []


def test_what_came_on_each_connection_is_told(listening: socket.socket) -> None:
    with connected(listening, b"x" * 3000) as (_, first, _), connected(listening, b"y") as (_, second, _):
        assert connections.received(port_of(listening)) == {first: 3000, second: 1}
        assert sorted(connections.peers(port_of(listening))) == sorted([first, second])
