"""Templates with real processes: what they fork is like what is spawned, and nothing depends on them."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID
from sluice_server.services.process.template import ENGINES, NAME, STAGES, Forked
from sluice_server.services.supervisor import templates as module
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.template_process import TemplateProcess
from sluice_server.services.supervisor.templates import MAX_STARTS, Templates, kinds_for, may_fork_engines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")

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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as made:
        yield made


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


def test_what_is_forked_has_what_one_that_is_spawned_has(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.ready(STAGES)
    said = []
    for templates in (True, False):
        child = bench.child(ABOUT, templates=templates)
        child.start()
        assert end_of(child) == "tokenizer-0 ended with exit status 0"
        out = capfd.readouterr().out
        said.append(out.replace(f"'{READY_FD}', ", ""))  # of a file that a tokenizer has not
    assert said[0] == said[1] and f" {os.getpid()} " in said[0]


def test_it_is_a_child_of_the_supervisor_and_outlives_the_template(bench: Bench, tmp_path: Path) -> None:
    bench.ready(STAGES)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    child = bench.child(f"open({str(begun)!r}, 'w').close(); {PAUSE}")
    child.start()
    begun.open().close()  # waits until the process runs its program: it has its title by then
    assert len(named("tokenizer-0")) == 1
    (template,) = named("template-stages")
    kill(template)
    assert child.is_running and child.ended() == ""
    child.signal(signal.SIGTERM)
    assert end_of(child) == "tokenizer-0 was killed by SIGTERM"


def test_a_killed_template_is_made_anew_and_until_then_processes_are_spawned(bench: Bench) -> None:
    bench.ready(STAGES)
    (template,) = named("template-stages")
    kill(template)
    child = bench.child("raise SystemExit(5)")
    assert not child.is_awaited
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5"
    assert bench.said == ["sluice: tokenizer-0 is spawned, which takes longer: no template-stages can fork"]
    bench.ready(STAGES)
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5" and len(named("template-stages")) == 1


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("kind", [STAGES, ENGINES])
def test_the_spare_of_a_template_that_is_lost_takes_its_place_at_once(
    tmp_path: Path, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model that wakes would be spawned, beside a template that imports the same: seconds on a busy machine."""
    monkeypatch.setattr("sluice_server.services.supervisor.template_process.ANSWER_S", 1.0)
    role = {STAGES: Role.TOKENIZER, ENGINES: Role.ENGINE}[kind]
    with contextlib.closing(Bench(tmp_path, (STAGES, ENGINES))) as bench:
        bench.ready(STAGES, ENGINES)
        before = {bench.templates._now[kind]._process.pid}
        bench.spare_ready(kind)
        assert len(named(f"template-{kind}")) == 2
        (first,) = [one for one in named(f"template-{kind}") if one.pid in before]
        if how == "killed":
            kill(first)
        else:
            first.suspend()
        child = bench.child("raise SystemExit(5)", role)
        assert not child.is_awaited
        child.start()
        assert end_of(child) == f"{role}-0 ended with exit status 5" and not bench.said
        assert not {one.pid for one in named(f"template-{kind}")} & before
        bench.spare_ready(kind)
        assert len(named(f"template-{kind}")) == 2  # it has a spare of its own


def test_spares_that_end_again_and_again_are_given_up(bench: Bench) -> None:
    bench.ready(STAGES)
    for _ in range(MAX_STARTS + 2):
        bench.templates.turn()
        if STAGES in bench.templates._spare:
            bench.templates._spare[STAGES].end()
    assert bench.templates._spares[STAGES] == MAX_STARTS
    child = bench.child("raise SystemExit(5)")
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5" and not bench.said


def test_a_stopped_template_costs_time_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_server.services.supervisor.template_process.ANSWER_S", 0.1)
    bench.ready(STAGES)
    (template,) = named("template-stages")
    template.suspend()
    child = bench.child("raise SystemExit(5)")
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5" and not named("template-stages")


def test_the_first_start_waits_for_it_and_later_ones_do_not(bench: Bench) -> None:
    child, edge = bench.child(PAUSE), Child("edge-0", None, {}, "edge")
    assert not child.is_awaited
    bench.templates.turn()
    assert child.is_awaited
    assert not Running(edge, bench.command, Path(), bench.write, bench.templates).is_awaited
    bench.ready(STAGES)
    assert not child.is_awaited
    for template in named("template-stages"):
        kill(template)
    bench.templates.turn()
    assert not child.is_awaited


def test_the_template_of_engines_is_forked_from_the_other(tmp_path: Path) -> None:
    with contextlib.closing(Bench(tmp_path, (STAGES, ENGINES))) as bench:
        engine = bench.child(ABOUT, Role.ENGINE)
        bench.templates.turn()
        assert engine.is_awaited
        bench.ready(STAGES, ENGINES)
        engine.start()
        assert end_of(engine) == "engine-0 ended with exit status 0"
        for template in named("template-stages"):
            kill(template)
        assert len(named("template-engines")) == 1
        engine.start()
        assert end_of(engine) == "engine-0 ended with exit status 0"


def test_one_that_ends_again_and_again_is_given_up(bench: Bench) -> None:
    bench.have((STAGES,), (sys.executable, "-c", "raise SystemExit"))
    before = set(psutil.Process().children())
    for _ in range(MAX_STARTS + 2):
        bench.templates.turn()
        for template in set(psutil.Process().children()) - before:
            template.wait(30)
    assert bench.templates._starts[STAGES] == MAX_STARTS
    child = bench.child("raise SystemExit(5)")
    assert not child.is_awaited
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5"


def test_no_file_is_left_open(bench: Bench) -> None:
    bench.ready(STAGES)
    (template,) = named("template-stages")
    own, counts = psutil.Process(), set()
    for status in range(20):
        child = bench.child(f"raise SystemExit({status})")
        child.start()
        assert end_of(child) == f"tokenizer-0 ended with exit status {status}"
        counts.add((own.num_fds(), template.num_fds()))
    assert len(counts) == 1
    assert not template.children()


def test_a_template_that_is_not_like_this_process_is_made_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ready(STAGES)
    monkeypatch.setenv("SOMETHING", "else")
    child = bench.child("raise SystemExit(os.environ['SOMETHING'] != 'else')")
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 0" and not named("template-stages")
    bench.ready(STAGES)
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 0"
    (template,) = named("template-stages")
    template.nice(template.nice() + 1)
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 0" and not named("template-stages")


def test_random_numbers_are_each_process_own(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.templates.close()
    alone = "os.environ['OPENBLAS_NUM_THREADS'] = '1'"  # else numpy has threads
    loads = PROGRAM.replace("while", f"{alone}\nimport random, numpy.random\ndel {alone.partition(' = ')[0]}\nwhile")
    bench.have((STAGES,), (sys.executable, "-c", loads))
    bench.ready(STAGES)
    for _ in range(3):
        child = bench.child("import random, numpy.random; print(random.random(), numpy.random.random(), flush=True)")
        child.start()
        assert end_of(child) == "tokenizer-0 ended with exit status 0"
    assert len(named("template-stages")) == 1
    numbers = capfd.readouterr().out.split()
    assert len(set(numbers)) == len(numbers) == 6


def test_what_is_forked_collects_its_own_garbage_and_not_that_of_the_template(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.ready(STAGES)
    child = bench.child("import gc; print(gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()), flush=True)")
    child.start()
    end_of(child)
    assert capfd.readouterr().out == "True True\n"


def test_a_template_with_threads_forks_nothing(bench: Bench) -> None:
    bench.templates.close()
    busy = PROGRAM.replace("while", "import threading\nthreading.Thread(target=threading.Event().wait).start()\nwhile")
    bench.have((STAGES,), (sys.executable, "-c", busy))
    bench.ready(STAGES)
    child = bench.child("raise SystemExit(5 if 'threading' not in sys.modules else 0)")
    child.start()
    assert end_of(child).startswith("tokenizer-0 ended with exit status") and not named("template-stages")


def test_a_template_waits_for_a_thread_that_has_ended_and_is_still_there(bench: Bench) -> None:
    """As of imports at a low priority: a thread that was joined is listed for a moment more."""
    bench.templates.close()
    lists = "real, seen = os.listdir, iter([['1', '2']] * 3)\nos.listdir = lambda at: next(seen, None) or real(at)\n"
    bench.have((STAGES,), (sys.executable, "-c", PROGRAM.replace("while", f"{lists}while")))
    bench.ready(STAGES)
    child = bench.child("raise SystemExit(0)")
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 0" and len(named("template-stages")) == 1


@pytest.mark.parametrize("kind", [STAGES, ENGINES])
def test_a_real_template_has_one_thread_and_no_library_that_fork_breaks(kind: str) -> None:
    program = (
        "import os, sys\n"
        "from sluice_server.services.process import template\n"
        f"template._import({kind!r})\n"
        "print(len(os.listdir('/proc/self/task')), 'grpc' in sys.modules, 'uvloop' in sys.modules, "
        "'torch' in sys.modules, 'OPENBLAS_NUM_THREADS' in os.environ)"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["1", "False", "True", str(kind == ENGINES), "False"]


def test_engines_of_a_gpu_or_of_several_ranks_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_torch_for_cpu", lambda: False)
    assert may_fork_engines("cpu") and not may_fork_engines("auto") and not may_fork_engines("cuda")
    assert kinds_for(EngineConfig()) == (STAGES,)
    assert kinds_for(EngineConfig(device="cpu")) == (STAGES, ENGINES)
    templates = module.Templates((STAGES, ENGINES), (), -1, print)
    told = [templates._kind(Role.ENGINE, {"SLUICE_DEVICE": device}) for device in ("cpu", "cuda")]
    assert told == [ENGINES, ""] and templates._kind(Role.ENGINE, {}) == "" and templates._kind(None, {}) == ""
    assert kinds_for(EngineConfig(device="cpu", tensor_parallel_size=2)) == (STAGES,)


def test_one_that_is_asked_by_nobody_ends(bench: Bench) -> None:
    bench.ready(STAGES)
    (template,) = named("template-stages")
    bench.templates.close()
    assert not template.is_running() and SUPERVISOR_PID not in os.environ


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


def test_where_the_system_refuses_the_calls_there_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refused)
    bench.have((STAGES,), bench.command)
    bench.templates.turn()
    assert not named("template-stages") and not bench.child(PAUSE).is_awaited


def test_at_a_rolling_restart_there_are_new_ones(bench: Bench) -> None:
    bench.ready(STAGES)
    before = named("template-stages")
    bench.templates.renew()
    assert not named("template-stages")
    child = bench.child("raise SystemExit(5)")
    assert not child.is_awaited
    child.start()
    assert end_of(child) == "tokenizer-0 ended with exit status 5"
    bench.ready(STAGES)
    assert named("template-stages") != before and bench.templates._starts[STAGES] == 2
