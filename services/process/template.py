"""A template: a process with one thread that has imported what others of a service need, and forks them when asked.

What it forks starts within milliseconds and shares its memory. It has no event loop, socket of the ring, gRPC or CUDA,
and no thread: none of them survives a fork. Its supervisor asks it over a socket, and is the parent of each forked
process, so that the end of a template ends no other process.
"""

import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
import setproctitle

from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.aside import import_aside, import_needs
from sluice_server.services.process.library_pages import give_back_library_pages
from sluice_server.services.process.sibling import fork_sibling
from sluice_server.services.process.supervised import TEMPLATE, TEMPLATE_KIND, die_with_supervisor, say_template

STAGES, ENGINES = "stages", "engines"  # the kinds
MADE_BY = {Role.GATEWAY: STAGES, Role.TOKENIZER: STAGES, Role.DETOKENIZER: STAGES, Role.ENGINE: ENGINES}
MAX_REQUEST_BYTES = 1 << 20
MAX_FILES = 6
GO = b"g"
ENDING_S = 0.1  # the longest that a thread that was joined is still there
NAME = "SLUICE_PROCESS_ID"  # of a process, as its supervisor lists it
BLAS_THREADS = "OPENBLAS_NUM_THREADS"  # read when numpy is loaded, which starts them at once; engines use none of them


class Fork(msgspec.Struct, frozen=True):
    """A process that a supervisor asks for, with its standard files, and a pipe on which it waits for `GO`.

    Attributes:
        environment: what it has beside the template's own.
        inherits: the variables that say the numbers of further files.
    """

    environment: dict[str, str]
    inherits: tuple[str, ...] = ()


class Forked(msgspec.Struct, frozen=True):
    """A template's answer: the process, or why there is none."""

    pid: int = 0
    error: str = ""


def become_forked() -> None:
    """Runs this process as the template that its environment names. Returns in each process that it forks, and exits
    when its supervisor has closed the socket."""
    number, kind = os.environ.pop(TEMPLATE), os.environ.pop(TEMPLATE_KIND)
    setproctitle.setproctitle(f"sluice: template-{kind}")
    die_with_supervisor()
    with socket.socket(fileno=int(number)) as channel:
        with _without_collections():
            _import(kind)
        give_back_library_pages()
        say_template(kind)
        _serve(channel)


def _import(kind: str) -> None:
    roles = [role for role, made_by in MADE_BY.items() if made_by == kind]
    with _without_blas_threads():
        if ASIDE in os.environ:
            import_aside(*roles)
            del os.environ[ASIDE]  # what it forks may start beside nothing
        else:
            for role in roles:
                import_needs(role)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Has garbage collection pass over what is made meanwhile, for ever: here, where it would take a fifth of the time
    and find half a megabyte, and in forked processes, which leave the shared memory alone then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _without_blas_threads() -> Iterator[None]:
    before = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[BLAS_THREADS]
        if before is not None:
            os.environ[BLAS_THREADS] = before


def _serve(channel: socket.socket) -> None:
    """Forks what is asked for; returns in what was forked."""
    while True:
        data, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_FILES)
        if not data:
            raise SystemExit
        try:
            _wait_for_threads()
            pid = fork_sibling()
        except OSError as error:
            answer = Forked(error=str(error))
        else:
            if not pid:
                channel.close()
                _begin(msgspec.msgpack.decode(data, type=Fork), files)
                return
            answer = Forked(pid)
        for file in files:
            os.close(file)
        channel.send(msgspec.msgpack.encode(answer))


def _wait_for_threads() -> None:
    """Waits until threads that have ended are gone: joined, they are there for a moment more. Raises OSError for
    others."""
    end_s = time.monotonic() + ENDING_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() >= end_s:
            raise OSError(0, "the template has threads")
        time.sleep(ENDING_S / 100)


def _begin(asked: Fork, files: list[int]) -> None:
    """Makes of this process what a spawned one is: its group, files, environment and random numbers."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    *standard, go = files[:4]
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(asked.environment)
    setproctitle.setproctitle(f"sluice: {os.environ.get(NAME, '')}")
    os.environ.update(zip(asked.inherits, map(str, files[4:]), strict=True))
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:  # Python makes its own anew
        numbers.seed()
    with os.fdopen(go, "rb", 0) as told:
        if told.read(1) != GO:  # whoever asked is gone, or did not wait for the answer
            os._exit(1)
