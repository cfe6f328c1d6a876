"""A service whose processes are forked: what a user sees when a template or what it forked ends, and without any."""

import contextlib
import os
import signal
import sys

import grpc
import psutil
import pytest

from tests.system.service import Service, generate, serve, spec, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")
KINDS = {"stages", "engines"}
STAGES = {"gateway-0", "tokenizer-0", "engine-0", "detokenizer-0"}


def is_serving(service: Service) -> bool:
    """Whether a generation ends well."""
    with service.stub() as stub, contextlib.suppress(grpc.RpcError):
        return bool(generate(stub, spec("def f(", 4)).text)
    return False


def mapped(process: psutil.Process) -> set[str]:
    """The libraries that a process has loaded."""
    return {os.path.basename(one.path) for one in process.memory_maps()}


def test_the_processes_of_a_service_are_forked_and_outlive_the_templates() -> None:
    with serve() as service:
        before, templates = service.children(), service.templates()
        assert before.keys() == STAGES and templates.keys() == KINDS
        own = psutil.Process(service.process.pid)
        wait_until(lambda: len(own.children()) == len(before) + 2 * len(templates), 30, "each has a spare")
        assert "libtorch_cpu.so" not in {*mapped(before["tokenizer-0"]), *mapped(before["gateway-0"])}
        all_templates = set(own.children()) - set(before.values())
        for template in all_templates:
            template.kill()
        wait_until(lambda: not any(template.is_running() for template in all_templates), 30, "they are gone")
        assert is_serving(service)
        wait_until(lambda: service.templates().keys() == KINDS, 60, "there are new ones")
        assert service.children() == before


@pytest.mark.parametrize(
    "name", ["engine-0", *(pytest.param(one, marks=pytest.mark.long) for one in ("tokenizer-0", "gateway-0"))]
)
def test_a_forked_process_that_is_killed_is_forked_again(name: str) -> None:
    with serve() as service:
        before, templates = service.children(), service.templates()
        before[name].kill()
        wait_until(lambda: service.children().get(name, before[name]) != before[name], 60, "it is back")
        wait_until(lambda: is_serving(service), 60, "it serves")
        assert service.templates() == templates


def test_without_templates_they_are_spawned() -> None:
    with serve("--no-process-templates") as service:
        assert service.children().keys() == STAGES and not service.templates()
        assert is_serving(service)


def test_a_rolling_restart_makes_them_anew() -> None:
    """What was installed since is imported then, as by processes that are spawned."""
    with serve() as service:
        before, templates = service.children(), service.templates()

        def are_new() -> bool:
            now = service.templates()
            return now.keys() == KINDS and all(now[kind] != templates[kind] for kind in KINDS)

        def have_restarted() -> bool:
            now = service.children()
            return all(now.get(name, before[name]) != before[name] for name in STAGES - {"gateway-0"})

        service.process.send_signal(signal.SIGHUP)
        wait_until(are_new, 90, "there are new ones")
        wait_until(have_restarted, 90, "all have restarted")
        wait_until(lambda: is_serving(service), 60, "it serves")
