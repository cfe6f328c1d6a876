"""Finds environment variables that look like settings but are not: a misspelt one would be ignored silently.

Uses names only; values are read by the options.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from sluice_server.services.config import ENV_PREFIX

CHECKED = "SLUICE_ENVIRONMENT_CHECKED"  # set for a `sluice` that another one starts, which has checked already
# Variables that are no options: set by a supervisor for its children, or used by compose.yaml.
OTHERS = frozenset(
    {
        CHECKED,
        "SLUICE_SUPERVISOR_PID",
        "SLUICE_GROUP_EPOCH",
        "SLUICE_READY_FD",
        "SLUICE_ASIDE",
        "SLUICE_PORT",
        "SLUICE_HTTP_PORT",
        "SLUICE_TEXT_IMAGE",
        "SLUICE_ENGINE_IMAGE",
        "SLUICE_CUDA_IMAGE",
        "SLUICE_ENGINE_MEMORY",
        "SLUICE_ENGINE_CPUS",
    }
)
SERVICE_HOST = "_SERVICE_HOST"  # Kubernetes sets such variables in every pod for each service NAME
OF_SERVICE = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")


def complaints(environment: Mapping[str, str], every_command: Callable[[], Typer]) -> list[str]:
    """Returns a line for each variable that starts with the prefix of settings and is none. `every_command` is called
    if there is any such variable."""
    ours = sorted(name for name in environment if name.startswith(ENV_PREFIX))
    if not ours or CHECKED in environment or "SLUICE_SUPERVISOR_PID" in environment:
        return []
    known = names_of(every_command()) | OTHERS
    links = tuple(
        name.removesuffix(SERVICE_HOST) + end for name in ours if name.endswith(SERVICE_HOST) for end in OF_SERVICE
    )
    unknown = (name for name in ours if name not in known and not name.startswith(links))
    return [_complaint(name, known) for name in unknown]


def names_of(app: Typer) -> frozenset[str]:
    """Returns the variables of all options of `app`, its commands and their subcommands."""
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
    ends = sorted(one.removeprefix(ENV_PREFIX) for one in known)  # the common prefix must not count as similarity
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), ends, n=1)
    hint = f"; did you mean {ENV_PREFIX}{near[0]}?" if near else "; `sluice COMMAND --help` lists them"
    return f"warning: {name} is no setting and is ignored{hint}"
