"""A process that a template forked, as its supervisor handles it: what `Popen` is for one that it spawned."""

import contextlib
import os
import select
import signal
import subprocess
from typing import Protocol


class ProcessHandle(Protocol):
    """A child process of this one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Returns how it ended: its status, or the negative signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Sends it a signal unless it has ended."""

    def kill(self) -> None:
        """Sends it SIGKILL unless it has ended."""


class ForkedProcess:
    """A child process that a template forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""
        return self._take(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises TimeoutExpired."""
        if timeout is not None and self.poll() is None:
            file = os.pidfd_open(self.pid)
            try:
                if not select.select([file], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            finally:
                os.close(file)
        status = self._take(0)
        assert status is not None, "it has ended"
        return status

    def send_signal(self, sig: int) -> None:
        """Sends it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Sends it SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _take(self, options: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(InterruptedError):
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
