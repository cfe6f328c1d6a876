"""Implements `sluice serve`: checks the settings, makes the run directory and runs the supervisor."""

import dataclasses
import functools
import os
import secrets
import shlex
import sys
import time
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.checkpoint.model_source import DEMO, directory_of, resolve_model
from sluice_server.services.checkpoint.packaged import SMOLLM2
from sluice_server.services.checks.models import check_files
from sluice_server.services.checks.planned import budget_of, front_bytes
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig, bad_setting
from sluice_server.services.gateway.access.identity import access_of, as_digest, read_access
from sluice_server.services.gateway.access.tls_files import files_of
from sluice_server.services.process.edge_settings import check_http, url
from sluice_server.services.process.library_pages import give_back_library_pages
from sluice_server.services.process.listening import UNIX, check_plaintext, check_vllm, split
from sluice_server.services.process.model_table import ModelTable
from sluice_server.services.ranks.settings import check_ranks
from sluice_server.services.supervisor.block_size import with_any_size, with_block_size
from sluice_server.services.supervisor.directory import run_directory
from sluice_server.services.supervisor.early import EarlyTemplate, take
from sluice_server.services.supervisor.first_models import of_file, of_one
from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.moving import Moving
from sluice_server.services.supervisor.plan import free_address, plan_children, plan_fronts, plan_lane
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.room import Budget
from sluice_server.services.supervisor.scale import EngineFile, EngineScale
from sluice_server.services.supervisor.supervisor import Supervisor
from sluice_server.services.supervisor.templates import kinds_for
from sluice_server.services.supervisor.wakeups import STOP, wakeups

EMBEDDED = (
    f"\nsluice: {DEMO} is the embedded model, which completes Python, badly; --model takes {SMOLLM2}, a checkpoint "
    "directory, a GGUF file or a hub id"
)
COMMAND = (sys.executable, "-m", "sluice_server")


def supervise(engine: EngineConfig, service: ServiceConfig) -> int:
    """Run the whole ring until it is asked to stop. Returns the exit status. Raises ServiceError before any process
    starts."""
    early = take(os.environ)
    wanted, engine = engine, with_any_size(engine, service)
    check(engine, service)
    check_access(service)
    check_plaintext("listen", service.listen, bool(service.tls_cert), service.insecure)
    check_http(service)
    check_ranks(engine, service)
    if service.http:
        split("http", service.http)
        check_plaintext("http", service.http, bool(service.tls_cert), service.insecure)
    if service.listen.startswith(UNIX) and service.gateways > 1:
        raise bad_setting("gateways", f"{service.gateways} processes cannot share {service.listen}; use host:port")
    check_vllm(service)
    if service.engines_file:
        raise bad_setting("engines_file", "is for --role; here SIGTTIN and SIGTTOU to this process add and end engines")
    service = dataclasses.replace(
        service,
        listen=free_address(service.listen),
        http=free_address(service.http, "http") if service.http else "",
        vllm_listen=free_address(service.vllm_listen) if service.vllm_listen else "",
        api_key=tuple(map(as_digest, service.api_key)),  # the processes need no key itself
        peer_secret=service.peer_secret or (secrets.token_hex(32) if service.gateways > 1 else ""),
    )
    if service.models:
        return _run(engine, service, of_file(engine, service, complain), "", early)
    source, is_embedded = resolve_model(service.model, service.revision), service.model == DEMO
    check_files(source.directory, engine, service)
    service = dataclasses.replace(
        service,
        model=str(source.path),
        revision=source.label,
        served_model_name=service.served_model_name or source.name,
    )
    engine, service = with_block_size(wanted, service, source.directory, complain)
    return _run(engine, service, of_one(service), EMBEDDED if is_embedded else "", early)


def _run(
    engine: EngineConfig, service: ServiceConfig, table: ModelTable, hint: str, early: EarlyTemplate | None
) -> int:
    """Run a service with these models until it is asked to stop. `hint` follows the line that it serves. `early`: a
    template that was started already."""
    start = time.monotonic()

    def on_ready(ready: str) -> None:
        address, revision = ready.split()
        took = time.monotonic() - start
        http = f", on {url(service.http, has_tls=bool(service.tls_cert))}" if service.http else ""
        line = f"sluice: serving {_named(table, revision)} on {address}{http}"
        line += f", ready in {took:.1f} s"
        print(line + hint, flush=True)  # at once: who waits may read one line and leave
        give_back_library_pages()
        give_back()

    signals: list[int] = []
    with wakeups(signals), run_directory() as directory:
        if any(number in STOP for number in signals):
            return 0
        path = directory.path
        scale = None
        if service.models:
            children, back = plan_fronts(engine, service, path), Path(service.models)
        else:
            children, back = plan_children(engine, service, path), directory_of(Path(service.model))
            scale = EngineScale(EngineFile(engine, service, path, len(children)), complain, service.grace_s)
        save_s = engine.disk_cache_save_s if engine.disk_cache_dir else 0.0
        restarts = Restarts(service.max_restarts, save_s=save_s, way_back=way_back(back))
        plan = functools.partial(plan_lane, engine, service, path)
        budget = Budget(budget_of(service), front_bytes(service))
        lanes = Lanes(plan, path, complain, service.max_restarts, table, budget)
        kinds = kinds_for(engine) if service.process_templates else ()
        moving = Moving(scale, lanes, kinds, early)
        supervisor = Supervisor(children, COMMAND, directory, restarts, complain, moving)
        return supervisor.run(on_ready, service.grace_s, signals)


def complain(text: str) -> None:
    """Prints a line for operators, at once."""
    print(text, file=sys.stderr, flush=True)


def _named(table: ModelTable, revision: str) -> str:
    """Returns what a service serves, for operators."""
    models = [entry.model for entry in table.lanes.values()]
    if len(models) == 1:
        return f"{models[0]} (revision {revision})"
    return f"{', '.join(models)} (by default {table.default}, revision {revision})"


def check_access(service: ServiceConfig) -> None:
    """Check keys, access file and certificate once, before any process starts. Raises ServiceError."""
    access_of(service.api_key)
    if service.access_file:
        read_access(Path(service.access_file))
    files = files_of(service.tls_cert, service.tls_key, service.tls_client_ca)
    if files is not None:
        from sluice_server.services.gateway.access.tls import read  # loads grpc, which a supervisor needs for this only

        read(files)


def way_back(model: Path) -> tuple[str, str]:
    """Returns what to put back, and the command to type, if a requested restart does not succeed."""
    words = ["sluice", *sys.argv[1:]]
    if any(word.startswith(("--peer-secret", "--api-key")) for word in words):
        return f"what was changed (the model is in {model})", "start the service again"
    return f"what was changed (the model is in {model})", f"type: {shlex.join(words)}"
