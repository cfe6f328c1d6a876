"""Runs the ring's processes: starts them, says when they serve, and leaves nothing behind however it ends.

A child that dies or is stopped breaks the ring: gateways are told (SIGUSR1) so that every client has a status within
two seconds, then all is taken down. Knows processes and signals; nothing of what the processes do.
"""

import contextlib
import dataclasses
import fcntl
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from engine.config import EngineConfig
from engine.errors import Code, ServiceError
from services.config import ServiceConfig, bad_setting, check, to_environment
from services.listening import UNIX, bound, check_plaintext, split
from services.messages import Role
from services.model_source import resolve_model

RUN_DIRECTORY_PREFIX = "sluice-run-"
LOCK = "lock"
JUST_MADE_S = 60.0
LAST_WORDS_S = 0.7  # what gateways get to tell their clients that a stage was lost
TERMINATE_S = 2.0  # what inner processes get to leave after SIGTERM
POLL_S = 0.5  # a child's end wakes us by SIGCHLD; this is only for what could be missed
COMMAND = (sys.executable, "-m", "services.cli.main", "serve")


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """One process to run."""

    process_id: str
    role: Role
    environment: Mapping[str, str]


class Supervisor:
    """Owns the child processes from start to the last one's end."""

    def __init__(self, children: list[Child], command: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._children = children
        self._command = command
        self._say = say
        self._running: dict[str, tuple[Child, subprocess.Popen[bytes]]] = {}
        self._ready_read, self._ready_write = os.pipe()
        self._signals: list[int] = []

    def run(self, on_ready: Callable[[str], None], grace_s: float) -> int:
        """Start all, wait for the end; the exit status. `on_ready` gets the address once every gateway serves."""
        with _wakeups(self._signals) as wake, contextlib.ExitStack() as cleanup:
            cleanup.callback(self._close_pipe)
            cleanup.callback(self._kill_all)
            for child in self._children:
                self._start(child)
            return self._watch(wake, on_ready, grace_s)

    def _start(self, child: Child) -> None:
        own = {"SLUICE_SUPERVISOR_PID": str(os.getpid()), "SLUICE_READY_FD": str(self._ready_write)}
        process = subprocess.Popen(
            self._command,
            env={**os.environ, **child.environment, **own},
            start_new_session=True,  # a terminal's Ctrl-C and Ctrl-Z reach the supervisor only
            pass_fds=[self._ready_write] if child.role is Role.GATEWAY else [],
        )
        self._running[child.process_id] = (child, process)

    def _watch(self, wake: int, on_ready: Callable[[str], None], grace_s: float) -> int:
        waiting = {child.process_id for child in self._children if child.role is Role.GATEWAY}
        num_ready, num_gateways = 0, len(waiting)
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._ready_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(POLL_S):
                    data = os.read(key.fd, 4096)
                    if key.fd == self._ready_read:
                        num_ready += data.count(b"\n")
                        if num_ready == num_gateways:
                            on_ready(data.decode().split()[1])
                if self._stop_asked():
                    return self._drain(grace_s)
                broken = self._broken()
                if broken:
                    self._say(f"sluice: {broken}; the service ends")
                    return self._give_up()

    def _stop_asked(self) -> bool:
        return any(number in (signal.SIGTERM, signal.SIGINT) for number in self._signals)

    def _broken(self) -> str:
        """What is wrong with a child, or ""."""
        for process_id, (_, process) in self._running.items():
            found, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
            if not found:
                continue
            if os.WIFSTOPPED(status):
                os.kill(process.pid, signal.SIGKILL)
                return f"{process_id} was stopped"
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode < 0:
                return f"{process_id} was killed by {signal.Signals(-process.returncode).name}"
            return f"{process_id} ended with exit status {process.returncode}"
        return ""

    def _give_up(self) -> int:
        """The ring is broken: let gateways tell their clients, then end everything."""
        gateways = self._of(lambda child: child.role is Role.GATEWAY)
        self._signal(gateways, signal.SIGUSR1)
        self._wait(gateways, LAST_WORDS_S)
        return 1

    def _drain(self, grace_s: float) -> int:
        """Asked to stop: gateways finish what runs, then the rest leaves. A second signal is fast."""
        num_signals = len(self._signals)
        for names, wait_s in (
            (self._of(lambda child: child.role is Role.GATEWAY), grace_s + TERMINATE_S),
            (self._of(lambda child: child.role is not Role.GATEWAY), TERMINATE_S),
        ):
            self._signal(names, signal.SIGTERM)
            self._wait(names, wait_s, lambda: self._asked_again(num_signals))
        return 0

    def _asked_again(self, before: int) -> bool:
        return any(number in (signal.SIGTERM, signal.SIGINT) for number in self._signals[before:])

    def _of(self, wanted: Callable[[Child], bool]) -> list[str]:
        return [process_id for process_id, (child, _) in self._running.items() if wanted(child)]

    def _signal(self, names: list[str], number: signal.Signals) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                self._running[name][1].send_signal(number)

    def _wait(self, names: list[str], seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        for name in names:
            while self._running[name][1].poll() is None and time.monotonic() < end and not is_over():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running[name][1].wait(0.02)

    def _kill_all(self) -> None:
        """SIGKILL to whatever is left, with its own children; SIGCONT first does no good and is not needed."""
        for _, process in self._running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for _, process in self._running.values():
            process.wait()

    def _close_pipe(self) -> None:
        os.close(self._ready_read)
        os.close(self._ready_write)


def supervise(engine: EngineConfig, service: ServiceConfig) -> int:
    """`sluice serve`: run the whole ring until told to stop; the exit status. Raises ServiceError before any start."""
    check(engine, service)
    check_plaintext("listen", service.listen, bool(service.tls_cert), service.insecure)
    if service.listen.startswith(UNIX) and service.gateways > 1:
        raise bad_setting("gateways", f"{service.gateways} processes cannot share {service.listen}; use host:port")
    source = resolve_model(service.model, service.revision)
    service = dataclasses.replace(
        service,
        model=str(source.directory),
        revision=source.revision,
        served_model_name=service.served_model_name or source.name,
        listen=free_address(service.listen),
        peer_secret=service.peer_secret or (secrets.token_hex(32) if service.gateways > 1 else ""),
    )
    start = time.monotonic()

    def on_ready(address: str) -> None:
        took = time.monotonic() - start
        name = service.served_model_name
        print(f"sluice: serving {name} (revision {source.revision}) on {address}, ready in {took:.1f} s", flush=True)

    def complain(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with run_directory() as directory:
        children = plan_children(engine, service, directory)
        return Supervisor(children, COMMAND, complain).run(on_ready, service.grace_s)


def plan_children(engine: EngineConfig, service: ServiceConfig, directory: Path) -> list[Child]:
    """Every process with its environment; the engine first, as it takes longest to start."""
    counts = {
        Role.ENGINE: 1,
        Role.GATEWAY: service.gateways,
        Role.TOKENIZER: service.tokenizers,
        Role.DETOKENIZER: service.detokenizers,
    }
    ids = {role: [f"{role}-{i}" for i in range(num)] for role, num in counts.items()}
    address = {name: f"ipc://{directory}/{name}" for names in ids.values() for name in names}
    peers = {role: ",".join(f"{name}={address[name]}" for name in names) for role, names in ids.items()}
    children: list[Child] = []
    for role, names in ids.items():
        for name in names:
            own = dataclasses.replace(
                service,
                role=role,
                process_id=name,
                inbox=address[name],
                metrics_port=service.metrics_port and service.metrics_port + len(children),
                gateway_peers=peers[Role.GATEWAY],
                tokenizer_peers=peers[Role.TOKENIZER],
                engine_peers=peers[Role.ENGINE],
                detokenizer_peers=peers[Role.DETOKENIZER],
            )
            children.append(Child(name, role, to_environment(engine, own)))
    return children


def free_address(listen: str) -> str:
    """The address to listen on, port 0 replaced by a free one. Raises ServiceError when it is taken."""
    if listen.startswith(UNIX):
        return listen
    host, port = split("listen", listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "LISTEN_FAILED",
                f"--listen: cannot listen on {listen} ({error.strerror}); stop what uses it or choose another port",
                field="listen",
            ) from error
        return bound(listen, probe.getsockname()[1])


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory for the ring's sockets, removed at the end; those of killed supervisors are removed first."""
    base = Path(tempfile.gettempdir())
    for stale in base.glob(f"{RUN_DIRECTORY_PREFIX}*"):
        if _is_stale(stale):
            shutil.rmtree(stale, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=RUN_DIRECTORY_PREFIX, dir=base))  # mode 0700
    with (directory / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    """Whether its owner is gone: only a living supervisor holds the lock, which it takes right after the directory."""
    if not (directory / LOCK).exists():
        return time.time() - directory.stat().st_mtime > JUST_MADE_S
    try:
        with (directory / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _wakeups(arrived: list[int]) -> Iterator[int]:
    """A file descriptor that becomes readable at SIGTERM, SIGINT and SIGCHLD, which are collected in `arrived`."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def note(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    old = signal.set_wakeup_fd(write)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
