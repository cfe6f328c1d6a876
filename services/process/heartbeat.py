"""Heartbeats of a process, in a file that its supervisor or the exec probe of a container reads.

The loop of a process writes one every `BEAT_S`, and the engine one after each layer of its model: a busy or idle
process is alive, a silent one is stuck. Times are of the monotonic clock, which all processes of a host share.
"""

import contextlib
import dataclasses
import os
import struct
import time
from pathlib import Path

from sluice_server.services.process import private

BEAT_S = 0.5
PATIENCE_S = 5.0  # a process that is silent for longer is stuck
STEPS_OF_PATIENCE = 10  # or the time of this many engine steps, if that is longer
_RECORD = struct.Struct("<dd")
MAX_NOTE_BYTES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """One heartbeat: its time, how long the process may be silent after it, and what keeps it from its work."""

    at_s: float
    patience_s: float
    note: str = ""

    def silence(self, now_s: float) -> float:
        """Returns the seconds since the heartbeat."""
        return now_s - self.at_s

    def is_stuck(self, now_s: float) -> bool:
        """Whether the process has been silent for longer than `patience_s`."""
        return self.silence(now_s) > self.patience_s


class Heartbeat:
    """Writes the heartbeats of one process. Writes nothing if `directory` is ""."""

    def __init__(self, directory: str, process_id: str) -> None:
        """Raises OSError if the file cannot be written, or is not private to this user."""
        self._file = -1
        self._path = path_of(directory, process_id)
        self._note = ""
        self._notes: dict[str, str] = {}  # of the rings that have one
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()

    def beat(self, step_s: float = 0.0) -> None:
        """Write a heartbeat; `step_s` is the duration of one step of the engine."""
        if self._file < 0:
            return
        patience_s = max(PATIENCE_S, STEPS_OF_PATIENCE * step_s)
        with contextlib.suppress(OSError):  # a full disk or a missing directory; a later beat may succeed
            if not os.fstat(self._file).st_nlink:  # something removed it
                self._open()
            os.pwrite(self._file, _RECORD.pack(time.monotonic(), patience_s), 0)

    def note(self, text: str, ring: str = "") -> None:
        """Write what keeps the process from its work in a ring; "" if nothing does. A gateway is in several."""
        self._notes.pop(ring, None)
        if text:
            self._notes[ring] = text
        text = "; ".join(dict.fromkeys(self._notes.values()))
        if self._file >= 0 and text != self._note:
            with contextlib.suppress(OSError):  # as in `beat`
                os.ftruncate(self._file, _RECORD.size)
                os.pwrite(self._file, text.encode()[:MAX_NOTE_BYTES], _RECORD.size)
                self._note = text

    def close(self) -> None:
        """Close the file. The last heartbeat stays in it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        file = private.open_file(self._path, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(file, 0)
        self.close()
        self._file, self._note = file, ""


def path_of(directory: str | Path, process_id: str) -> Path:
    """Returns the file of a process's heartbeats."""
    return Path(directory) / f"{process_id}.alive"


def read(directory: str | Path, process_id: str) -> HeartbeatRecord | None:
    """Returns the last heartbeat; None if the process has written none since its start."""
    try:
        file = os.open(path_of(directory, process_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(file, _RECORD.size + MAX_NOTE_BYTES)
    except OSError:  # a directory, for example
        return None
    finally:
        os.close(file)
    if len(data) < _RECORD.size:
        return None
    at_s, patience_s = _RECORD.unpack_from(data)
    return HeartbeatRecord(at_s, patience_s, data[_RECORD.size :].decode(errors="replace"))
