"""Implements `sluice serve`: makes the run directory and runs the supervisor."""

import functools
import shlex
import sys
import time

from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.checks.planned import budget_of, front_bytes
from sluice_server.services.process.edge_settings import url
from sluice_server.services.process.library_pages import give_back_library_pages
from sluice_server.services.process.model_table import ModelTable
from sluice_server.services.supervisor.complaints import announce, complain
from sluice_server.services.supervisor.directory import run_directory
from sluice_server.services.supervisor.early import EarlyTemplate
from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.moving import Moving
from sluice_server.services.supervisor.plan import plan_children, plan_fronts, plan_lane
from sluice_server.services.supervisor.prepared import Prepared
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.room import Budget
from sluice_server.services.supervisor.scale import EngineFile, EngineScale
from sluice_server.services.supervisor.supervisor import Supervisor
from sluice_server.services.supervisor.templates import kinds_for
from sluice_server.services.supervisor.wakeups import STOP, wakeups

COMMAND = (sys.executable, "-m", "sluice_server")


def run(prepared: Prepared, early: EarlyTemplate | None = None) -> int:
    """Run the service, or the process alone, until it is asked to stop. Returns the exit status. `early`: a template
    that was started already. Raises ServiceError."""
    engine, service, table = prepared.engine, prepared.service, prepared.table
    if service.role:
        # Imported here: a supervisor does not need the code of the roles.
        from sluice_server.services.process.alone import run_alone

        return run_alone(engine, service)
    start = time.monotonic()

    def on_ready(ready: str) -> None:
        address, revision = ready.split()
        took = time.monotonic() - start
        http = f", on {url(service.http, has_tls=bool(service.tls_cert))}" if service.http else ""
        line = f"sluice: serving {_named(table, revision)} on {address}{http}"
        line += f", ready in {took:.1f} s"
        announce(line + prepared.hint)
        give_back_library_pages()
        give_back()

    signals: list[int] = []
    with wakeups(signals), run_directory() as directory:
        if any(number in STOP for number in signals):
            return 0
        path = directory.path
        scale = None
        if service.models:
            children = plan_fronts(engine, service, path)
        else:
            children = plan_children(engine, service, path)
            scale = EngineScale(EngineFile(engine, service, path, len(children)), complain, service.grace_s)
        save_s = engine.disk_cache_save_s if engine.disk_cache_dir else 0.0
        restarts = Restarts(service.max_restarts, save_s=save_s, way_back=way_back(prepared.files))
        plan = functools.partial(plan_lane, engine, service, path)
        budget = Budget(budget_of(service), front_bytes(service))
        lanes = Lanes(plan, path, complain, service.max_restarts, table, budget)
        kinds = kinds_for(engine) if service.process_templates else ()
        moving = Moving(scale, lanes, kinds, early)
        supervisor = Supervisor(children, COMMAND, directory, restarts, complain, moving)
        return supervisor.run(on_ready, service.grace_s, signals)


def _named(table: ModelTable, revision: str) -> str:
    """Returns what a service serves, for operators."""
    models = [entry.model for entry in table.lanes.values()]
    if len(models) == 1:
        return f"{models[0]} (revision {revision})"
    return f"{', '.join(models)} (by default {table.default}, revision {revision})"


def way_back(model: str) -> tuple[str, str]:
    """Returns what to put back, and the command to type, if a requested restart does not succeed."""
    words = ["sluice", *sys.argv[1:]]
    if any(word.startswith(("--peer-secret", "--api-key")) for word in words):
        return f"what was changed (the model is in {model})", "start the service again"
    return f"what was changed (the model is in {model})", f"type: {shlex.join(words)}"
