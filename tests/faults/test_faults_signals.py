"""The service stopped by each signal: streams end as they should, and no process or file is left."""

import signal
import threading
import time

import grpc
from sluice.v1 import inference_pb2

from tests.system.service import Service, generate, serve, spec, wait_until


class Reader(threading.Thread):
    """Reads a long stream until it ends; notes the first token, the status and when it came."""

    def __init__(self, service: Service, num_tokens: int, n: int = 1) -> None:
        super().__init__()
        self.first = threading.Event()
        self.status: grpc.StatusCode | None = None
        self.ended_at = 0.0
        self._service = service
        self._spec = spec([5, 6, 7], num_tokens, n=n)

    def run(self) -> None:
        with self._service.stub() as stub:
            request = inference_pb2.StreamGenerateRequest(spec=self._spec)
            try:
                for event in stub.StreamGenerate(request, timeout=60):
                    if event.HasField("delta"):
                        self.first.set()
                self.status = grpc.StatusCode.OK
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                self.status = error.code()
            self.ended_at = time.monotonic()


def test_sigterm_lets_running_generations_finish() -> None:
    with serve() as service:
        reader = Reader(service, 600)  # long enough to run still, and to end within its grace on any machine
        reader.start()
        assert reader.first.wait(60)
        service.process.send_signal(signal.SIGTERM)
        reader.join(60)
        assert reader.status is grpc.StatusCode.OK
        assert service.process.wait(60) == 0


def test_second_signal_is_fast() -> None:
    with serve() as service:
        reader = Reader(service, 1900, n=8)  # far from its end when the second signal comes
        reader.start()
        assert reader.first.wait(60)
        service.process.send_signal(signal.SIGINT)
        wait_until(lambda: refuses(service), 30, "the first signal did not close the door")
        assert reader.is_alive()
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(30) == 0
        reader.join(60)
        assert reader.status is grpc.StatusCode.UNAVAILABLE


def refuses(service: Service) -> bool:
    """Whether a new request is refused because the server drains."""
    with service.stub() as stub:
        try:
            generate(stub, spec([5], 1))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False
