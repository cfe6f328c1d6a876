"""Faults in real processes: on PYTHONPATH of a service under test, Python runs this at its start.

SLUICE_TEST_POISON=ID: an engine that is given a prompt with that token id dies at once.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

POISON = int(os.environ.get("SLUICE_TEST_POISON", "-1"))


def poison(module: Any) -> None:  # noqa: ANN401  # a module with the attributes of engine.scheduler.scheduler
    add = module.Scheduler.add

    def deadly(self: object, request: Any) -> None:  # noqa: ANN401  # an EngineRequest
        if POISON in request.prompt_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, request)

    module.Scheduler.add = deadly


FAULTS = {"engine.scheduler.scheduler": poison} if POISON >= 0 else {}


class Injector(importlib.abc.MetaPathFinder):
    """Changes modules right after they were loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in FAULTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            FAULTS[name](module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # what an injector is for
        return spec


sys.meta_path.insert(0, Injector())
