"""The template that is started before the command line is imported: when, and that the supervisor takes it over."""

import contextlib
import os
import sys

import psutil
import pytest

from sluice_server.services.process.supervised import SUPERVISOR_PID
from sluice_server.services.process.template import STAGES
from sluice_server.services.supervisor.early import SETTING, begin
from sluice_server.services.supervisor.templates import Templates

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")


@pytest.fixture
def before() -> set[psutil.Process]:
    """What other tests have left running."""
    return set(psutil.Process().children())


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["generate"], {}),
        ([], {}),
        (["serve", "--help"], {}),
        (["serve", "--role=engine"], {}),
        (["serve", "--role", "engine"], {}),
        (["serve"], {"SLUICE_ROLE": "engine"}),
        (["serve", "--no-process-templates"], {}),
        (["serve"], {SETTING: "0"}),
        (["serve"], {SETTING: "False"}),
    ],
)
def test_there_is_none_without_a_use_for_it(
    arguments: list[str], variables: dict[str, str], before: set[psutil.Process]
) -> None:
    assert begin(arguments, variables) is None
    assert set(psutil.Process().children()) <= before


def test_the_supervisor_takes_it_over(before: set[psutil.Process]) -> None:
    found = begin(["serve", "--listen", "x"], os.environ)
    assert found is not None and SUPERVISOR_PID not in os.environ
    (process,) = set(psutil.Process().children()) - before
    assert process.pid == found.pid and os.getpgid(found.pid) == found.pid
    templates = Templates((STAGES,), ("false",), found.ready[1], print, found)
    with contextlib.closing(templates):
        templates.turn()
        assert templates._starts == {STAGES: 1}
        assert os.read(found.ready[0], 99) == f"template {STAGES} ready\n".encode()
        templates.heard(STAGES)
        own = {"SLUICE_PROCESS_ID": "x-0", "SLUICE_ROLE": "none", SUPERVISOR_PID: str(os.getpid())}
        forked = templates._fork(STAGES, own, (), ())
        assert forked is not None and forked.wait(60) != 0  # there is no such role
        assert set(psutil.Process().children()) - before == {process}
    assert not process.is_running()
    for file in found.ready:
        os.close(file)


def test_one_that_the_settings_do_not_want_ends(before: set[psutil.Process]) -> None:
    found = begin(["serve"], os.environ)
    assert found is not None
    Templates((), ("false",), found.ready[1], print, found)
    assert set(psutil.Process().children()) <= before
    for file in found.ready:
        os.close(file)
