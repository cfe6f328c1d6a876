"""Imports what a process of a model needs at a low priority, so that models that serve meanwhile lose little.

That is most of what a start takes that no template has made: torch alone is a second.
"""

import contextlib
import importlib

from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.messages.processes import Role

MODULES = {
    Role.TOKENIZER: "sluice_server.services.tokenizer.process",
    Role.ENGINE: "sluice_server.services.engine.process",
    Role.DETOKENIZER: "sluice_server.services.detokenizer.process",
}


def import_aside(*roles: str) -> None:
    """Imports what processes of these roles need, see `call_aside`. What cannot be imported is left to who needs it."""
    call_aside(lambda: _import(*roles))


def import_needs(role: str) -> None:
    """Imports what a process of this role needs, and what its kernels are named by."""
    importlib.import_module("sluice_server.services.process.inherited")
    if role == Role.ENGINE:
        from sluice_server.engine.worker.host.torch_import import import_torch

        import_torch()
    if role in MODULES:
        importlib.import_module(MODULES[Role(role)])
    if role == Role.ENGINE:
        from sluice_server.kernels.contract import build

        build()  # reads the kernels, in a template once for all that it forks


def _import(*roles: str) -> None:
    with contextlib.suppress(Exception):
        for role in roles:
            import_needs(role)
