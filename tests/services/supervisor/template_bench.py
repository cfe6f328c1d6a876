"""Templates with real processes for tests: their pipe, and the processes that they fork."""

import contextlib
import os
import selectors
import sys
from pathlib import Path

import psutil

from sluice_server.services.messages.processes import Role
from sluice_server.services.process.template import NAME, STAGES
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.template_process import TemplateProcess
from sluice_server.services.supervisor.templates import Templates

# A template of little: it imports nothing, and what it forks runs the program of its environment.
PROGRAM = """
import os, sys
from sluice_server.services.process import template
template.import_needs = lambda role: None
while "SLUICE_TEMPLATE" in os.environ:
    template.become_forked()
exec(os.environ["PROGRAM"])
"""
# What a process passes on or has of its own, as one line.
ABOUT = """
import signal, random
lines = open("/proc/self/status").read().splitlines()
status = [line for line in lines if line.split(":")[0] in ("SigBlk", "SigIgn", "SigCgt", "Umask", "Threads")]
files = sorted(os.listdir("/proc/self/fd"), key=int)
print(status, os.getpgrp() == os.getpid(), os.getppid(), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0),
    os.getcwd(), [os.readlink(f"/proc/self/fd/{number}") for number in files[:3]], len(files),
    sorted(name for name in os.environ if name != "LINES" and name != "COLUMNS"), flush=True)
"""
PAUSE = "import signal; signal.pause()"


class Bench:
    """Templates, and the pipe on which they say that they are ready."""

    def __init__(self, directory: Path, kinds: tuple[str, ...] = (STAGES,)) -> None:
        self._directory = directory
        self._read, self.write = os.pipe()
        self.command = (sys.executable, "-c", PROGRAM)
        self.said: list[str] = []
        self.have(kinds, self.command)

    def have(self, kinds: tuple[str, ...], command: tuple[str, ...]) -> None:
        """Has these templates from now on."""
        self.templates = Templates(kinds, command, self.write, self.said.append)

    def ready(self, *kinds: str) -> None:
        """Waits until these can fork."""
        for kind in kinds:
            self.templates.turn()
            self._hear_of(self.templates._now[kind])

    def spare_ready(self, kind: str) -> None:
        """Waits until the spare of one can fork."""
        self.templates.turn()
        self._hear_of(self.templates._spare[kind])

    def _hear_of(self, template: TemplateProcess) -> None:
        while not template.is_ready:
            with selectors.DefaultSelector() as selector:
                selector.register(self._read, selectors.EVENT_READ)
                assert selector.select(60), "a template is not ready"
            for line in os.read(self._read, 4096).decode().splitlines():
                assert line.split()[::2] == ["template", "ready"]
                self.templates.heard(line.split()[1])

    def child(self, program: str, role: Role = Role.TOKENIZER, templates: bool = True) -> Running:
        """A process that is not started yet."""
        child = Child(f"{role}-0", role, {"PROGRAM": program, NAME: f"{role}-0"})
        return Running(child, self.command, self._directory, self.write, self.templates if templates else None)

    def close(self) -> None:
        """Ends what there is."""
        self.templates.close()
        os.close(self._read)
        os.close(self.write)


def end_of(child: Running) -> str:
    child.wait(30)
    return child.ended()


def kill(process: psutil.Process) -> None:
    """Kills a child, of whose end only its templates take notice."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def named(title: str) -> list[psutil.Process]:
    """The children of this process with that title."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if " ".join(child.cmdline()).strip() == f"sluice: {title}":
                found.append(child)
    return found
