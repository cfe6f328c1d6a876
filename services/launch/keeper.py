"""Keeps one process of a ring alive on its machine: starts it, starts it again when it ends or hangs, and ends with it.

It knows nothing of what placed it there. Its process dies with it, and no second one with its id can run beside it on
the machine: a lock file is held until both are gone.
"""

import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sluice_server.services.config import ENV_PREFIX
from sluice_server.services.process import exit_reason, heartbeat
from sluice_server.services.process.supervised import SUPERVISOR_PID
from sluice_server.services.ring.keys import make_keys

logger = logging.getLogger(__name__)
LOOK_S = 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
CALM_S = 60.0  # a process that ran for so long is started again at once
END_S = 5.0  # what a process gets to leave beyond its own grace
SERVE = (sys.executable, "-m", "sluice_server", "serve")


class Keeper:
    """One process of a ring. Methods are called by one thread; another one, which starts the process, watches it."""

    def __init__(self, ring: str, process_id: str, command: Sequence[str] = SERVE) -> None:
        """Raises RuntimeError if a process with this id runs on this machine."""
        self._process_id = process_id
        self._command = command
        # The same for the next keeper on this machine, which finds the keys that the others know.
        self._folder = _private(_private(Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}-{ring}") / process_id)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RuntimeError(
                f"{process_id} of the ring {ring} runs on this machine already ({self._folder})"
            ) from None
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._num_restarts = 0
        self._reason = ""

    def prepare(self) -> str:
        """Makes the process's keys, of which the secret one stays here; returns the text of the public one."""
        make_keys(self._keys, [self._process_id])
        return (self._keys / f"{self._process_id}.key").read_text()

    def start(self, environment: Mapping[str, str], public_keys: Mapping[str, str]) -> None:
        """Starts the process, or starts it again with another environment. `public_keys`: of all, by id."""
        self.stop(0.0)
        for name, text in public_keys.items():
            (self._keys / f"{name}.key").write_text(text)
        own = {"RING_KEYS": str(self._keys), "HEARTBEAT_DIR": str(self._run)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith((ENV_PREFIX, "RAY_"))}
        mine = {ENV_PREFIX + name: value for name, value in own.items()}
        self._environment = {**kept, **environment, **mine, SUPERVISOR_PID: str(os.getpid())}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(self._ending,), name="keeper", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, str | int]:
        """Returns how the process does: its pid (0: none runs), restarts, and why it ended last."""
        process = self._process
        pid = process.pid if process is not None and process.poll() is None else 0
        return {"pid": pid, "restarts": self._num_restarts, "reason": self._reason}

    def stop(self, grace_s: float) -> None:
        """Ends the process by SIGTERM, which it has `grace_s` for, then by SIGKILL."""
        self._ending.set()
        process, thread = self._process, self._thread
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s + END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if thread is not None:
            thread.join(END_S)
        self._thread = None

    def close(self) -> None:
        """Removes what it has on the machine. The process has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    @property
    def _keys(self) -> Path:
        return self._folder / "keys"

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def _keep(self, ending: threading.Event) -> None:
        """Runs the process until it is to end. The kernel kills a child when the thread that started it ends: this one
        lives as long as the child."""
        pause_s = FIRST_PAUSE_S
        while not ending.is_set():
            start = time.monotonic()
            for left in (
                exit_reason.path_of(self._run, self._process_id),
                heartbeat.path_of(self._run, self._process_id),
            ):
                Path(left).unlink(missing_ok=True)
            process = self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, pass_fds=(self._lock,)
            )
            self._watch(process, ending)
            if ending.is_set():
                process.wait()
                return
            self._reason = exit_reason.read(self._run, self._process_id) or _status(process.returncode)
            self._num_restarts += 1
            logger.warning("%s ended (%s); starting it again", self._process_id, self._reason)
            pause_s = FIRST_PAUSE_S if time.monotonic() - start > CALM_S else min(2 * pause_s, MAX_PAUSE_S)
            ending.wait(pause_s)

    def _watch(self, process: subprocess.Popen[bytes], ending: threading.Event) -> None:
        while process.poll() is None and not ending.is_set():
            sign = heartbeat.read(self._run, self._process_id)
            if sign is not None and sign.is_stuck(time.monotonic()):
                logger.warning("%s was stuck for %.1f s", self._process_id, sign.silence(time.monotonic()))
                process.kill()
                process.wait()
                return
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue


def _private(folder: Path) -> Path:
    """Makes a folder that this user alone can use; returns it. Raises RuntimeError if there is another one."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{folder} is not a folder of this user alone: remove it")
    return folder


def _status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
