"""Variables of the environment that look like settings and are none: a misspelt one would be ignored without a word.

Knows the names only; values are read where the options are.
"""

import difflib
from collections.abc import Iterable, Mapping

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from sluice_server.services.config import ENV_PREFIX

CHECKED = "SLUICE_ENVIRONMENT_CHECKED"  # set for a `sluice` that another one starts: it was said already
# Ours, but no options: of a supervisor for its children, and of compose.yaml.
OTHERS = frozenset(
    {
        CHECKED,
        "SLUICE_SUPERVISOR_PID",
        "SLUICE_READY_FD",
        "SLUICE_PORT",
        "SLUICE_TEXT_IMAGE",
        "SLUICE_ENGINE_IMAGE",
        "SLUICE_CUDA_IMAGE",
        "SLUICE_ENGINE_MEMORY",
        "SLUICE_ENGINE_CPUS",
    }
)
SERVICE_HOST = "_SERVICE_HOST"  # Kubernetes tells every pod of a service NAME by these variables
OF_SERVICE = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")


def complaints(environment: Mapping[str, str], app: Typer) -> list[str]:
    """A line for each variable that begins as settings do and is none."""
    ours = sorted(name for name in environment if name.startswith(ENV_PREFIX))
    if not ours or CHECKED in environment or "SLUICE_SUPERVISOR_PID" in environment:
        return []
    known = names_of(app) | OTHERS
    links = tuple(
        name.removesuffix(SERVICE_HOST) + end for name in ours if name.endswith(SERVICE_HOST) for end in OF_SERVICE
    )
    unknown = (name for name in ours if name not in known and not name.startswith(links))
    return [_complaint(name, known) for name in unknown]


def names_of(app: Typer) -> frozenset[str]:
    """Variables that are options of a command of `app`, or of a command of its commands."""
    found: set[str] = set()
    left = [get_command(app)]
    while left:
        command = left.pop()
        for parameter in command.params:
            names = parameter.envvar or ()
            found.update((names,) if isinstance(names, str) else names)
        if isinstance(command, TyperGroup):
            left.extend(command.commands.values())
    return frozenset(found)


def _complaint(name: str, known: Iterable[str]) -> str:
    ends = sorted(one.removeprefix(ENV_PREFIX) for one in known)  # what all begin with is no likeness
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), ends, n=1)
    hint = f"; did you mean {ENV_PREFIX}{near[0]}?" if near else "; `sluice COMMAND --help` lists them"
    return f"warning: {name} is no setting and is ignored{hint}"
