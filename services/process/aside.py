"""Imports what a process of a model needs at a low priority, so that models that serve meanwhile lose little.

That is most of what a start takes: torch alone is a second. Linux has a priority for each thread, and one may lower its
own but not raise it again: so a thread imports, and ends; the thread that waits for it keeps its priority. Where no
other work waits for a processor a low priority costs nothing.
"""

import contextlib
import importlib
import os
import threading

from sluice_server.services.messages.processes import Role

NICE = 10  # a tenth of the share of an ordinary thread
MODULES = {
    Role.TOKENIZER: "sluice_server.services.tokenizer.process",
    Role.ENGINE: "sluice_server.services.engine.process",
    Role.DETOKENIZER: "sluice_server.services.detokenizer.process",
}


def import_aside(*roles: str) -> None:
    """Imports what processes of these roles need. What cannot be imported is left to who needs it."""
    thread = threading.Thread(target=_import, args=roles, name="imports")
    thread.start()
    thread.join()


def import_needs(role: str) -> None:
    """Imports what a process of this role needs."""
    importlib.import_module("sluice_server.services.process.inherited")
    if role == Role.ENGINE:
        from sluice_server.engine.worker.host.torch_import import import_torch

        import_torch()
    if role in MODULES:
        importlib.import_module(MODULES[Role(role)])


def lower(process: int) -> None:
    """Lowers the priority of a process or thread, if the system lets it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, max(NICE, os.getpriority(os.PRIO_PROCESS, process)))


def _import(*roles: str) -> None:
    lower(threading.get_native_id())
    with contextlib.suppress(Exception):
        for role in roles:
            import_needs(role)
