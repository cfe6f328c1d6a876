"""Signs of life of a process, in a file that its supervisor, or the exec probe of a container, reads.

A process beats whenever its loop turns, and the engine after each layer of its model: busy is not dead, idle is not
dead, stuck is silence. Times are of the monotonic clock, which all processes of a host share.
"""

import contextlib
import dataclasses
import os
import struct
import time
from pathlib import Path

from sluice_server.services.process import private

BEAT_S = 0.5
PATIENCE_S = 5.0  # silence that means stuck
STEPS_OF_PATIENCE = 10  # or so many of the engine's steps, if that is longer
_RECORD = struct.Struct("<dd")
MAX_NOTE_BYTES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """What a heartbeat says: when, how long the process may be silent from then on, and what keeps it from its work."""

    at_s: float
    patience_s: float
    note: str = ""

    def silence(self, now_s: float) -> float:
        """Seconds since."""
        return now_s - self.at_s

    def is_stuck(self, now_s: float) -> bool:
        """Whether it has been silent for too long."""
        return self.silence(now_s) > self.patience_s


class Heartbeat:
    """Writes one process's signs. Without a directory nothing is written."""

    def __init__(self, directory: str, process_id: str) -> None:
        """Raises OSError when the file cannot be written, or is not ours."""
        self._file = -1
        self._path = path_of(directory, process_id)
        self._note = ""
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()

    def beat(self, step_s: float = 0.0) -> None:
        """Alive now; `step_s` is how long a step of the engine takes."""
        if self._file < 0:
            return
        patience_s = max(PATIENCE_S, STEPS_OF_PATIENCE * step_s)
        with contextlib.suppress(OSError):  # a full disk, or no directory now: a later beat may be written
            if not os.fstat(self._file).st_nlink:  # something removed it
                self._open()
            os.pwrite(self._file, _RECORD.pack(time.monotonic(), patience_s), 0)

    def note(self, text: str) -> None:
        """What keeps it from its work; "" for nothing."""
        if self._file >= 0 and text != self._note:
            with contextlib.suppress(OSError):  # as in `beat`
                os.ftruncate(self._file, _RECORD.size)
                os.pwrite(self._file, text.encode()[:MAX_NOTE_BYTES], _RECORD.size)
                self._note = text

    def close(self) -> None:
        """The last sign stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        file = private.open_file(self._path, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(file, 0)
        self.close()
        self._file, self._note = file, ""


def path_of(directory: str | Path, process_id: str) -> Path:
    """The file of a process."""
    return Path(directory) / f"{process_id}.alive"


def read(directory: str | Path, process_id: str) -> HeartbeatRecord | None:
    """The last sign; None while the process has given none since it started."""
    try:
        file = os.open(path_of(directory, process_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(file, _RECORD.size + MAX_NOTE_BYTES)
    except OSError:  # of a directory, say
        return None
    finally:
        os.close(file)
    if len(data) < _RECORD.size:
        return None
    at_s, patience_s = _RECORD.unpack_from(data)
    return HeartbeatRecord(at_s, patience_s, data[_RECORD.size :].decode(errors="replace"))
