"""Templates with real processes: which processes are forked, since when, and that nothing depends on them."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.template import ENGINES, STAGES
from sluice_server.services.supervisor import templates as module
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.templates import MAX_STARTS, kinds_for, may_fork_engines
from tests.services.supervisor.template_bench import ABOUT, PAUSE, Bench, end_of, kill, named

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as made:
        yield made


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


def test_engines_of_a_gpu_or_of_several_ranks_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_torch_for_cpu", lambda: False)
    assert may_fork_engines("cpu") and not may_fork_engines("auto") and not may_fork_engines("cuda")
    assert kinds_for(EngineConfig()) == (STAGES,)
    assert kinds_for(EngineConfig(device="cpu")) == (STAGES, ENGINES)
    templates = module.Templates((STAGES, ENGINES), (), -1, print)
    told = [templates._kind(Role.ENGINE, {"SLUICE_DEVICE": device}) for device in ("cpu", "cuda")]
    assert told == [ENGINES, ""] and templates._kind(Role.ENGINE, {}) == "" and templates._kind(None, {}) == ""
    assert kinds_for(EngineConfig(device="cpu", tensor_parallel_size=2)) == (STAGES,)


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
