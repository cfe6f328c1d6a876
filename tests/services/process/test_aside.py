"""Imports of a process that starts beside models that serve: at a low priority, and nothing else of it is."""

import importlib
import subprocess
import sys
import threading

import pytest

from sluice_server.services.process.aside import MODULES, NICE, import_aside

PROGRAM = """
import os, sys, threading
from sluice_server.services.process import aside
found, lower = [], aside.lower
aside.lower = lambda thread: (lower(thread), found.append(os.getpriority(os.PRIO_PROCESS, thread)))
before = os.getpriority(os.PRIO_PROCESS, 0)
aside.import_aside("{role}")
after = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
print(found[0], after - before, "{module}" in sys.modules, threading.active_count())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
@pytest.mark.parametrize("role", MODULES)
def test_a_thread_of_low_priority_imports_what_the_role_needs(role: str) -> None:
    program = PROGRAM.format(role=role, module=MODULES[role])  # type: ignore[index] # of a role
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    priority, raised, *rest = ran.stdout.split()
    assert int(priority) >= NICE and raised == "0" and rest == ["True", "1"]


@pytest.mark.parametrize("role", ["", "none"])
def test_a_role_that_is_none_is_left_to_who_reads_it(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all processes need is imported, and no role's module; nothing is raised, in no thread."""
    named, failed = list[str](), list[object]()
    monkeypatch.setattr(importlib, "import_module", named.append)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    import_aside(role)
    assert named == ["sluice_server.services.process.inherited"] and not failed
