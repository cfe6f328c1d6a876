"""Threads of the engine process: those that compile grammars leave the processors to steps."""

import os
import sys

import pytest

from sluice_server.services.engine.process import grammar_threads
from sluice_server.services.process.background import NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
def test_grammars_compile_in_the_background() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with grammar_threads() as threads:
        assert threads.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == min(19, before + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
