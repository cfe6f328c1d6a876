"""Clients that vanish while their connections stay up without an answer (F6)."""

import signal
import subprocess
import sys

import pytest
from sluice.v1 import control_pb2

from tests.faults.test_faults_kill import nothing_is_left
from tests.system.service import Service, generate, serve, spec, wait_until

CLIENTS = 100
KEEPALIVE_S = 30 + 10  # as shipped: a ping after so long, and so long for its answer


def num_open(service: Service) -> int:
    with service.control() as control:
        return control.GetLoad(control_pb2.GetLoadRequest()).load.open_requests


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_clients_held_is_free_when_they_have_vanished() -> None:
    with serve() as service:
        command = [sys.executable, "-m", "tests.faults.half_open", service.address, str(CLIENTS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == f"spent {CLIENTS}\n"
                assert num_open(service) == CLIENTS
                client.send_signal(signal.SIGSTOP)
                with service.stub() as stub:
                    assert generate(stub, spec("x = ", 8)).text  # the others are served meanwhile
                wait_until(lambda: num_open(service) == 0, KEEPALIVE_S + 10, "clients that are gone hold requests")
                wait_until(lambda: nothing_is_left(service), 10, "requests of clients that are gone hold blocks")
            finally:
                client.kill()
