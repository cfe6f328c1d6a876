"""Export of spans to a real OTLP receiver: requests of limited size, over a channel that does not ping."""

import socket
import threading
from collections.abc import Iterator

import pytest

from sluice_server.services.telemetry import span_encoder
from sluice_server.services.telemetry.collector import Collector
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.span_export import SpanExport
from sluice_server.services.telemetry.spans import EndedSpan, Parent

TRACE = "ab" * 16
PARENT = Parent(f"00-{TRACE}-{'cd' * 8}-01")
PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
FRAME_HEADER, DATA, PING, ACK = 9, 0, 6, 1


class Relay:
    """Passes on the bytes of one connection to a port of this host, and keeps those of the client."""

    def __init__(self, port: int) -> None:
        self.came = bytearray()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection(("127.0.0.1", port))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listening.accept()
        with client:
            back = threading.Thread(target=self._answer, args=(client,), daemon=True)
            back.start()
            while data := client.recv(1 << 16):
                self.came += data
                self._server.sendall(data)
            self._server.shutdown(socket.SHUT_WR)
            back.join()

    def _answer(self, client: socket.socket) -> None:
        while data := self._server.recv(1 << 16):
            client.sendall(data)

    def frames(self) -> list[tuple[int, int]]:
        """Type and flags of each HTTP/2 frame that the client has sent, once it has left."""
        self._thread.join(60)
        self._listening.close()
        self._server.close()
        found, at = [], PREFACE
        while at + FRAME_HEADER <= len(self.came):
            found.append((self.came[at + 3], self.came[at + 4]))
            at += FRAME_HEADER + int.from_bytes(self.came[at : at + 3], "big")
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.stop()


def spans(num: int, text: str = "") -> list[EndedSpan]:
    return [EndedSpan(Phase(f"s{i}", 1.0, 2.0, {"text": text}), PARENT) for i in range(num)]


def test_the_collector_is_asked_without_a_ping_for_each_answer(collector: Collector) -> None:
    """A channel pings its server at answers to measure the way to it: several threads wake up each time."""
    relay = Relay(collector.port)
    export = SpanExport(relay.endpoint, {"service.name": "sluice"})
    for _ in range(3):
        assert export.send(spans(1))
    export.close()
    frames = relay.frames()
    assert sum(kind == DATA for kind, _ in frames) >= 3
    assert not [kind for kind, flags in frames if kind == PING and not flags & ACK]


def test_a_batch_of_large_spans_is_several_requests(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes 4 MiB at once unless it is told otherwise."""
    monkeypatch.setattr(span_encoder, "MAX_BYTES", 1000)
    export = SpanExport(collector.endpoint, {"service.name": "sluice"})
    batch = spans(5, "x" * 400)
    encoded = list(export._encoder.requests(batch))
    assert len(encoded) == 3 and max(map(len, encoded)) < 1500
    assert export.send([*batch, *spans(1, "y" * 2000)])
    export.close()
    found = collector.wait_until(lambda: len(collector._spans) >= 6, lambda: collector._spans, 10)
    assert sorted(one.name for one in found) == ["s0", "s0", "s1", "s2", "s3", "s4"]
