"""What a process that starts beside models that serve does at a low priority: imports, and reading a model's files."""

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import sluice_server.demo
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.worker.host.aside import ASIDE, NICE
from sluice_server.kernels.contract import build
from sluice_server.kernels.cpu import builds
from sluice_server.services.checkpoint.digests import Remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource
from sluice_server.services.config import ServiceConfig
from sluice_server.services.detokenizer import process as detokenizer
from sluice_server.services.engine import loading
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import joining
from sluice_server.services.process.aside import MODULES, import_aside, import_needs
from sluice_server.services.process.process import Process
from sluice_server.services.tokenizer import process as tokenizer
from sluice_server.services.tokenizer.encoding import TextEncoder

DEMO = Path(sluice_server.demo.__file__).parent / "target"

PROGRAM = """
import os, sys, threading
from sluice_server.engine.worker.host import aside
from sluice_server.services.process.aside import import_aside
found, lower = [], aside.lower
aside.lower = lambda thread: (lower(thread), found.append(os.getpriority(os.PRIO_PROCESS, thread)))
before = os.getpriority(os.PRIO_PROCESS, 0)
import_aside("{role}")
after = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
print(found[0], after - before, "{module}" in sys.modules, threading.active_count())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
@pytest.mark.parametrize("role", MODULES)
def test_a_thread_of_low_priority_imports_what_the_role_needs(role: str) -> None:
    program = PROGRAM.format(role=role, module=MODULES[role])  # type: ignore[index] # of a role
    command, own = [sys.executable, "-c", program], {**os.environ, ASIDE: "1"}
    ran = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=True)
    priority, raised, *rest = ran.stdout.split()
    assert int(priority) >= NICE and raised == "0" and rest == ["True", "1"]


def test_kernels_are_named_once_for_all_that_a_template_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    build.cache_clear()
    import_needs(Role.ENGINE)
    monkeypatch.setattr(builds, "MODULE", None)  # another name, for whoever looks again
    name = build()
    build.cache_clear()
    assert builds.MODULE is None and name != build()
    build.cache_clear()


@pytest.mark.parametrize("role", ["", "none"])
def test_a_role_that_is_none_is_left_to_who_reads_it(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all processes need is imported, and no role's module; nothing is raised, in no thread."""
    named, failed = list[str](), list[object]()
    monkeypatch.setenv(ASIDE, "1")
    monkeypatch.setattr(importlib, "import_module", named.append)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    import_aside(role)
    assert named == ["sluice_server.services.process.inherited"] and not failed


class Reached(Exception):
    """What a test replaces has been called."""


class Reading:
    """Stands for what reads files: ends the start that calls it.

    Attributes:
        priority: that of the thread that called it.
    """

    priority: int | None = None

    def __call__(self, *_: object, **__: object) -> None:
        self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        raise Reached


def process_of_demo() -> Process:
    """One that is about to read the demo model; it has no ring."""
    config = EngineConfig(kv_cache_tokens=2048)
    model = read_served(DEMO)
    source = ModelSource(DEMO, "demo", "")
    contents = CheckpointFiles(source, Remembered(None), with_weights=True)
    limits = limits_of(config, model, 1 << 20)
    parts = {"engine_config": config, "config": ServiceConfig(), "contents": contents, "model": model, "limits": limits}
    process = object.__new__(Process)
    for name, value in parts.items():
        object.__setattr__(process, name, value)
    return process


async def run_engine(process: Process) -> int:
    """Loads the engine of a process."""
    loading.load_engine(process.engine_config, process.contents, process.model, process.limits)
    return 0


async def read_files(process: Process) -> int:
    """Reads the files of a process."""
    joining.read_files(process.engine_config, process.config, with_weights=False)
    return 0


READERS: dict[str, tuple[object, str, Callable[[Process], Coroutine[Any, Any, int]]]] = {
    "files": (joining, "resolve_model", read_files),
    "tokenizer": (tokenizer, "load_encoder", tokenizer.run),
    "detokenizer": (TextEncoder, "load", detokenizer.run),
    "grammars": (loading, "grammars_of", run_engine),
    "digests": (CheckpointFiles, "named", run_engine),
}


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("is_aside", [True, False])
def test_files_are_read_at_a_low_priority_beside_models_that_serve(
    what: str, is_aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, run = READERS[what]
    reading = Reading()
    monkeypatch.setattr(where, name, reading)
    if is_aside:
        monkeypatch.setenv(ASIDE, "1")
    with pytest.raises(Reached):
        asyncio.run(run(process_of_demo()))
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert reading.priority == (max(own, NICE) if is_aside else own)
