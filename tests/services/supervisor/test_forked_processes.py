"""What templates fork, with real processes: it is like what is spawned, and shares nothing."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sluice_server.services.process.supervised import READY_FD, SUPERVISOR_PID
from sluice_server.services.process.template import ENGINES, STAGES
from tests.services.supervisor.template_bench import ABOUT, PROGRAM, Bench, end_of, named

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as made:
        yield made


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


def test_one_that_is_asked_by_nobody_ends(bench: Bench) -> None:
    bench.ready(STAGES)
    (template,) = named("template-stages")
    bench.templates.close()
    assert not template.is_running() and SUPERVISOR_PID not in os.environ
