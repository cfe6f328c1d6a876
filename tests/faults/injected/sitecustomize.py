"""Faults in real processes: on PYTHONPATH of a service under test, Python runs this at its start.

SLUICE_TEST_FAULTS is a JSON object; each key names a fault below, its value is that fault's argument.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

WANTED: dict[str, Any] = json.loads(os.environ.get("SLUICE_TEST_FAULTS", "{}"))


def poison(module: Any, token: int) -> None:  # noqa: ANN401  # a module, here and below
    """The engine process exits at once when a prompt has this id."""
    add = module.Scheduler.add

    def deadly(self: object, request: Any) -> None:  # noqa: ANN401  # an EngineRequest
        if token in request.prompt_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, request)

    module.Scheduler.add = deadly


def row_error(module: Any, token: int) -> None:  # noqa: ANN401
    """Computing a row with this id raises."""
    _before_launch(module, lambda plan: _raise(ValueError("a bug")) if token in plan.token_ids else None)


def out_of_memory(module: Any, most: int) -> None:  # noqa: ANN401
    """The device has memory for that many tokens a step."""
    import torch

    _before_launch(module, lambda plan: _raise(torch.OutOfMemoryError("injected")) if plan.num_tokens > most else None)


def device_lost(module: Any, marker: str) -> None:  # noqa: ANN401
    """The device is lost once, in the twentieth step after the first one for more than one token; `marker` is a file
    that says so."""
    from sluice_server.engine.errors import DeviceLost

    steps = 0

    def lose(plan: Any) -> None:  # noqa: ANN401  # a Plan
        nonlocal steps
        steps += 1 if steps or plan.num_tokens > 1 else 0
        if steps > 20 and not Path(marker).exists():
            Path(marker).touch()
            raise DeviceLost

    _before_launch(module, lose)


def leak(module: Any, num_bytes: int) -> None:  # noqa: ANN401
    """A gateway keeps that many bytes of every request for ever."""
    close, kept = module.RequestManager.close, []

    def leaking(self: object, request: object, error: object = None) -> None:
        kept.append(bytearray(num_bytes))
        close(self, request, error)

    module.RequestManager.close = leaking


def kept_rows(module: Any, _: bool) -> None:  # noqa: ANN401
    """An engine keeps the rows of every image for ever."""
    module.EncoderCache.drop = lambda self, digests: None


def kept_pixels(module: Any, _: bool) -> None:  # noqa: ANN401
    """A tokenizer keeps the pixels of every image for ever."""
    module.PixelCache.__init__.__defaults__ = (1 << 62,)


def kept_pictures(module: Any, _: bool) -> None:  # noqa: ANN401
    """A process that decodes keeps every image for ever."""
    if hasattr(module, "INHERITED"):  # of the one that starts it
        module.INHERITED += ("SLUICE_TEST_FAULTS",)
        return
    prepare, kept = module.prepare, []

    def keeping(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # as `prepare`
        found = prepare(*given, **named)
        kept.append(found)
        return found

    module.prepare = keeping


def schema(module: Any, version: int) -> None:  # noqa: ANN401
    """This process's messages have another schema version."""
    module.SCHEMA_VERSION = version


def version(module: Any, text: str) -> None:  # noqa: ANN401
    """This process is of another build."""
    module.VERSION = text


def slow(module: Any, place: str) -> None:  # noqa: ANN401
    """The named function "module:Class.function" is delayed by 50 ms."""
    owner_name, _, name = place.partition(":")[2].rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    function = getattr(owner, name)

    @functools.wraps(function)
    def delayed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any function
        time.sleep(0.05)
        return function(*args, **kwargs)

    setattr(owner, name, delayed)


def bug(module: Any, place: str) -> None:  # noqa: ANN401
    """The named method "module:Class.method" raises, with a text that no client may see."""
    owner_name, _, name = place.partition(":")[2].rpartition(".")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug at 0x7f3a99")

    setattr(getattr(module, owner_name), name, broken)


def pretended_gpus(module: Any, num: int) -> None:  # noqa: ANN401
    """A process that computes has one of so many pretended GPUs, and no other misses them."""
    if hasattr(module, "may_have_gpu"):
        module.may_have_gpu = lambda: True
        return
    if hasattr(module, "run_worker"):
        run_worker = module.run_worker

        def run_rank(*given: Any) -> Any:  # noqa: ANN401  # as `run_worker`
            from tests.pretended_gpu import processes

            with processes.pretended_gpus(num):
                return run_worker(*given)

        module.run_worker = run_rank
        return
    run = module.run

    async def run_engine(process: object) -> Any:  # noqa: ANN401  # as `run`
        from tests.pretended_gpu import processes

        with processes.pretended_gpus(num):
            return await run(process)

    module.run = run_engine


def _before_launch(module: Any, check: Callable[[Any], None]) -> None:  # noqa: ANN401
    compute = module.Runner._compute

    def checked(self: object, plan: Any, *more: Any) -> Any:  # noqa: ANN401  # a Plan in, a step out
        check(plan)
        return compute(self, plan, *more)

    module.Runner._compute = checked


def _raise(error: Exception) -> None:
    raise error


RUNNER = "sluice_server.engine.worker.runner"
KNOWN: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], None]]] = {
    "poison": (("sluice_server.engine.scheduler.scheduler",), poison),
    "row_error": ((RUNNER,), row_error),
    "out_of_memory": ((RUNNER,), out_of_memory),
    "device_lost": ((RUNNER,), device_lost),
    "leak": (("sluice_server.services.gateway.requests.manager",), leak),
    "kept_rows": (("sluice_server.engine.worker.slots.images",), kept_rows),
    "kept_pixels": (("sluice_server.services.media.preparing",), kept_pixels),
    "kept_pictures": (
        ("sluice_server.services.tokenizer.child_pool", "sluice_server.services.media.pixels"),
        kept_pictures,
    ),
    "schema": (("sluice_server.services.messages.messages",), schema),
    "pretended_gpus": (
        (
            *("sluice_server.services.engine.process", "sluice_server.services.ranks.process"),
            "sluice_server.engine.worker.host.gpus",
        ),
        pretended_gpus,
    ),
    "version": (("sluice_server.version",), version),
    "bug": ((str(WANTED.get("bug", "")).partition(":")[0],), bug),
    "slow": ((str(WANTED.get("slow", "")).partition(":")[0],), slow),
}


class Injector(importlib.abc.MetaPathFinder):
    """Changes modules right after they were loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wanted = [fault for fault in WANTED if fault in KNOWN and name in KNOWN[fault][0]]
        if not wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            for fault in wanted:
                KNOWN[fault][1](module, WANTED[fault])

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # what an injector is for
        return spec


def no_pickle(report: str) -> None:
    """Any unpickling is written to the file `report` and raises."""

    def refuse(*_: object, **__: object) -> None:
        with Path(report).open("a") as file:
            file.write(f"{sys.argv}: {sys._getframe(1).f_code}\n")
        raise RuntimeError("unpickling")

    for name in ("load", "loads", "_load", "_loads"):
        setattr(pickle, name, refuse)
    for name in ("Unpickler", "_Unpickler"):  # torch derives from them at its import
        setattr(pickle, name, type(name, (getattr(pickle, name),), {"load": refuse}))


if "no_pickle" in WANTED:
    no_pickle(WANTED["no_pickle"])
sys.meta_path.insert(0, Injector())
