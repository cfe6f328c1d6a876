"""One template as its supervisor has it."""

import os
import signal
import socket
import sys

import msgspec
import pytest

from sluice_server.services.process.template import Forked
from sluice_server.services.supervisor.template_process import TemplateProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")


class Late:
    """A template that answers as it is ended."""

    def __init__(self, peer: socket.socket, answer: bytes) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self._peer, self._answer = peer, answer

    def poll(self) -> None:
        """It runs."""

    def wait(self, timeout: float | None = None) -> int:
        """It has ended."""
        return 0

    def send_signal(self, sig: int) -> None:
        """It answers."""
        self._peer.send(self._answer)

    def kill(self) -> None:
        """It answers."""
        self.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("has_answer", [True, False])
def test_what_was_forked_before_it_was_ended_is_not_lost(has_answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_server.services.supervisor.template_process.ANSWER_S", 0.1)
    asked, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with peer:
        answer = Forked(4321) if has_answer else Forked(error="none")
        template = TemplateProcess(Late(peer, msgspec.msgpack.encode(answer)), asked)
        made = template.fork({})
        assert (made.pid if made is not None else 0) == (4321 if has_answer else 0)
        asked.close()
