"""Runs the command line. Where a ServiceError becomes a line on stderr and an exit status.

A process that a supervisor starts takes its settings from its environment, and needs no command line. A supervisor
leaves the command line to a process apart, and imports its own code meanwhile.
"""

import os
import sys
from typing import TYPE_CHECKING

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.process.apart import told_apart
from sluice_server.services.process.exit_reason import EXIT_REFUSED
from sluice_server.services.process.supervised import SUPERVISOR_PID, TEMPLATE, leave
from sluice_server.services.supervisor.early import begin

if TYPE_CHECKING:
    from typer import Typer

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command, or the process."""
    open_standard_files()
    try:
        if sys.argv[1:] == ["serve"] and SUPERVISOR_PID in os.environ:
            while TEMPLATE in os.environ:  # what a template forks may be another one
                from sluice_server.services.process.template import become_forked

                become_forked()
            if ASIDE in os.environ:
                from sluice_server.services.process.aside import import_aside

                import_aside(os.environ.get("SLUICE_ROLE", ""))
            from sluice_server.services.process.inherited import run_inherited

            leave(run_inherited(os.environ))
        if sys.argv[1:2] == ["serve"]:
            _serve()
        _run_command()
    except ServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:  # before or behind the command, which ends by itself
        sys.exit(EXIT_INTERRUPTED)


def open_standard_files() -> None:
    """Opens the null device as each standard file that is closed: a socket would take its number, and be printed to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _serve() -> None:
    """Runs a service, or a process of one, and exits; returns in the process that is to read the command line."""
    early = begin(sys.argv[1:], os.environ)
    told = told_apart(os.environ, _import_supervisor)
    if told is None:
        return
    import msgspec

    from sluice_server.services.supervisor import serve
    from sluice_server.services.supervisor.prepared import Prepared

    sys.exit(serve.run(msgspec.msgpack.decode(told, type=Prepared), early))


def _import_supervisor() -> None:
    from sluice_server.services.supervisor import serve  # noqa: F401 # the time of it is what this is for


def _run_command() -> None:
    from sluice_server.services.cli.app import alone
    from sluice_server.services.cli.environment import complaints

    for complaint in complaints(os.environ, _every_command):
        print(complaint, file=sys.stderr)
    app = alone(sys.argv[1]) if len(sys.argv) > 1 else None
    (app or _every_command())()


def _every_command() -> "Typer":
    from sluice_server.services.cli.main import app

    return app


if __name__ == "__main__":
    main()
