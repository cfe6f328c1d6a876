"""The generation that the compose check interrupts is really interrupted, on a machine of any speed."""

import functools

import grpc
import pytest

from tests.system.service import Service, serve, wait_until
from tools.generations import Interrupted, stream

NUM = 300


def kill(service: Service, name: str) -> None:
    """Kills a process of the ring; returns when another one has its name."""
    old = service.children()[name]
    old.kill()
    wait_until(lambda: service.children().get(name, old).pid != old.pid, 30, f"{name} does not come back")


@pytest.mark.long
def test_a_generation_is_interrupted_before_its_end() -> None:
    with serve("--model", "demo") as service:
        whole = stream(service.address, NUM)

        def late() -> None:
            """Kills so late that a generation without credit would have ended."""
            stream(service.address, NUM)
            wait_until(lambda: service.num_running() == 1, 30, "what is to be interrupted has ended")
            kill(service, "engine-0")

        assert Interrupted(service.address, NUM, late).text() == whole
        with pytest.raises(grpc.RpcError) as caught:
            Interrupted(service.address, NUM, functools.partial(kill, service, "gateway-0")).text()
        assert isinstance(caught.value, grpc.Call) and caught.value.code() is grpc.StatusCode.UNAVAILABLE
