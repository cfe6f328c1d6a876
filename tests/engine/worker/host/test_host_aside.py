"""What a start does at a low priority: on a thread that ends, while this one and those that last keep theirs."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sluice_server.demo
from sluice_server.engine import build, build_model
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models import loading
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.worker.host import slices
from sluice_server.engine.worker.host.aside import ASIDE, NICE, call_aside
from sluice_server.engine.worker.host.slices import LONGEST_S, turns_s
from sluice_server.engine.worker.startup import allocation, trial
from tests.system.service import wait_until

DEMO = Path(sluice_server.demo.__file__).parent / "target"
has_priorities = pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")


def priority() -> int:
    """That of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def priorities(before: list[str]) -> Iterator[int]:
    """Those of this thread and of all that have begun since there were those, also of threads that are not Python's."""
    yield priority()
    for thread in set(os.listdir("/proc/self/task")) - set(before):
        with contextlib.suppress(ProcessLookupError):
            yield os.getpriority(os.PRIO_PROCESS, int(thread))


@has_priorities
def test_a_thread_of_low_priority_does_the_work_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own, turns = threading.enumerate(), priority(), turns_s()
    monkeypatch.setenv(ASIDE, "1")
    assert call_aside(lambda: (priority(), turns_s())) == (max(own, NICE), LONGEST_S if turns else 0.0)
    assert (priority(), turns_s()) == (own, turns) and threading.enumerate() == before


def test_without_models_that_serve_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASIDE, raising=False)
    assert call_aside(threading.get_ident) == threading.get_ident()


def test_what_fails_fails_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASIDE, "1")
    with pytest.raises(ZeroDivisionError):
        call_aside(lambda: 1 // 0)


def test_work_is_done_where_the_system_refuses_priorities_and_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setenv(ASIDE, "1")
    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(slices, "CALLS", {})
    assert call_aside(lambda: 5) == 5


@has_priorities
def test_what_takes_long_is_made_aside_and_no_slow_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()

    def watch(module: ModuleType, name: str, call: Callable[..., object]) -> None:
        def watched(*arguments: object, **named: object) -> object:
            found.append(priority())
            return call(*arguments, **named)

        monkeypatch.setattr(module, name, watched)

    monkeypatch.setenv(ASIDE, "1")
    watch(build_model, "load_model", loading.load_model)
    watch(build, "allocate", allocation.allocate)
    watch(build, "check_trial", trial.check_trial)
    config, model = EngineConfig(kv_cache_tokens=2048, max_num_seqs=4, threads=7), read_served(DEMO)
    own, before = priority(), os.listdir("/proc/self/task")
    built = build_engine(config, model, DEMO, limits_of(config, model, 1 << 20))
    assert found == [max(own, NICE)] * 3
    # A thread that has ended stays for a moment.
    wait_until(lambda: set(priorities(before)) == {own}, 20, "all threads have the priority of this one")
    built.close()
