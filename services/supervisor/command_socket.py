"""The Unix socket on which the supervisor takes commands of its gateways: one line each way, then the connection ends.

It lies in the run directory, which is private to the user; who connects must be of the same user, too.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice_server.services.process.model_commands import MAX_LINE_BYTES, SOCKET, Answer, Command

PATIENCE_S = 0.5  # for a caller's line: meanwhile nothing else is watched
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class CommandSocket:
    """The socket: register `fileno`, call `take` when it is readable, `close` it."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if it cannot listen."""
        self._path = directory / SOCKET
        self._socket = self._opened()

    @property
    def fileno(self) -> int:
        """Becomes readable when a caller connects."""
        return self._socket.fileno()

    def take(self, carry_out: Callable[[Command], Answer]) -> None:
        """Takes one command and answers it. What is no command gets no answer."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            caller, _ = self._socket.accept()
            with caller:
                caller.settimeout(PATIENCE_S)
                if self._user_of(caller) != os.geteuid():
                    return
                command = msgspec.json.decode(self._line(caller), type=Command)
                caller.sendall(msgspec.json.encode(carry_out(command)) + b"\n")

    def reopen(self) -> None:
        """Listens anew, where something else has removed the socket. Raises OSError."""
        self._socket.close()
        self._socket = self._opened()

    def close(self) -> None:
        """Stops to listen."""
        self._socket.close()

    def _opened(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(str(self._path))
            made.listen()
        except OSError:
            made.close()
            raise
        return made

    @staticmethod
    def _user_of(caller: socket.socket) -> int:
        data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(data)
        return int(user)

    @staticmethod
    def _line(caller: socket.socket) -> bytes:
        data = b""
        while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
            more = caller.recv(1 << 16)
            if not more:
                break
            data += more
        return data
