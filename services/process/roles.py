"""Starts one process of the ring: title, signals, telemetry and ring connection, then the body of its role.

This is what `sluice serve --role …` runs, under a supervisor or alone in a container.
"""

import asyncio
import logging
import signal
from typing import assert_never

import setproctitle
import uvloop
import zmq

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.engine.worker.host.torch_import import import_torch
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from sluice_server.services.config import WORKER, ServiceConfig, bad_setting, parse_peers
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.media.serving import limits_for
from sluice_server.services.memory.watch import MemoryWatch
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.engine_table import EngineTable, engines_of
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.process.operations import Operations
from sluice_server.services.process.process import Process
from sluice_server.services.process.slices import SHORT_S, take_turns_of
from sluice_server.services.process.supervised import die_with_supervisor
from sluice_server.services.ring.figures import figures as ring_figures
from sluice_server.services.ring.keys import load_keys
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.peers import NEXT
from sluice_server.services.telemetry import logs, names
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.push import pushing
from sluice_server.services.telemetry.tracing import Tracer, TraceSampling

logger = logging.getLogger(__name__)

LOSSES = (signal.SIGUSR1, signal.SIGUSR2)  # sent to gateways when a process died, or restarts as planned
EXIT_OUTDATED = 75  # EX_TEMPFAIL: exit status of a process that is to be started again
MIN_MESSAGE_BYTES = 4 << 20  # for headers, and for what a prompt of the smallest allowed size can become


def run_role(engine_config: EngineConfig, config: ServiceConfig) -> int:
    """Run one process until it is asked to stop. Returns its exit status. Raises ServiceError for unusable settings."""
    if config.role == WORKER:
        import_torch()
        from sluice_server.services.ranks.process import run_worker  # loads torch

        return run_worker(engine_config, config, config.process_id or f"{WORKER}-1")
    role = Role(config.role)
    process_id = config.process_id or f"{role}-0"
    setproctitle.setproctitle(f"sluice: {process_id}")
    logs.configure(config.log_level, config.log_format, process_id)
    die_with_supervisor()
    take_turns_of(SHORT_S)
    for number in LOSSES:  # until a gateway installs its handlers
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(engine_config, config, role, process_id))


async def _run(engine_config: EngineConfig, config: ServiceConfig, role: Role, process_id: str) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    source = resolve_model(config.model, config.revision)
    contents = CheckpointFiles(source, remembered(), with_weights=role is Role.ENGINE)
    plugins = find_plugins(engine_config.plugins)
    model = read_served(contents.directory, plugins.models)
    engines = engines_of(config)
    directory, most = contents.directory, config.max_prompt_bytes
    limits = limits_for(engine_config, model, directory, most, plugins)
    ring = join_ring(config, role, process_id, engines.value, limits.images)
    ring.revision = contents.configuration
    ring.on_mixed = lambda: leave_if_changed(contents)
    resource = {"service.name": names.SERVICE_NAME, "service.instance.id": process_id, names.ROLE: str(role)}
    process = Process(
        engine_config=engine_config,
        config=config,
        role=role,
        source=source,
        contents=contents,
        model=model,
        limits=limits,
        ring=ring,
        tracer=Tracer.create(
            resource, config.otlp_endpoint, TraceSampling(config.trace_sample_ratio, config.trace_slow_s)
        ),
        metrics=Metrics(role, process_id),
        heart=open_heart(config, process_id),
        stopping=stopping,
        operations=Operations(process_id, ring.leases, ring.emit),
        memory=MemoryWatch(config.memory_warn_share) if config.memory_watch else None,
        plugins=plugins,
        engines=engines,
    )
    if role is Role.TOKENIZER:
        process.on_engines.append(lambda table: connect(ring, table))
    try:
        process.metrics.collect_from(lambda: ring_figures(ring))
        process.metrics.collect_from(process.tracer.figures)
        process.ring.on_keep = process.tracer.keep
        process.serve_profiles()
        if config.metrics_port:
            from sluice_server.services.telemetry.prometheus import serve as serve_metrics  # loads an HTTP server

            serve_metrics(process.metrics, config.metrics_host, config.metrics_port)
        async with pushing(process.metrics, resource, config.otlp_endpoint):
            return await _body(process)
    finally:
        await process.operations.close()
        if process.memory is not None:
            await process.memory.close()
        process.ring.stop()
        process.heart.close()
        process.tracer.shutdown()


async def _body(process: Process) -> int:
    """Run the role's body. Imports are local: each process loads only what its role needs, such as torch or grpc."""
    match process.role:
        case Role.GATEWAY:
            from sluice_server.services.gateway import process as gateway

            return await gateway.run(process)
        case Role.TOKENIZER:
            from sluice_server.services.tokenizer import process as tokenizer

            return await tokenizer.run(process)
        case Role.ENGINE:
            import_torch()
            from sluice_server.services.engine import process as engine_process

            return await engine_process.run(process)
        case Role.DETOKENIZER:
            from sluice_server.services.detokenizer import process as detokenizer

            return await detokenizer.run(process)
        case _:
            assert_never(process.role)


def connect(ring: RingLoop, engines: EngineTable) -> None:
    """Connect a tokenizer to the engines as they are now."""
    try:
        ring.change_peers({name: entry.address for name, entry in engines.items()})
    except ServiceError as error:
        logger.error("%s; the engines without a key get no requests from here", error.message)
    logger.info("the engines are %s from now on", ", ".join(sorted(engines)))


def join_ring(
    config: ServiceConfig, role: Role, process_id: str, engines: EngineTable, images: ImageForm | None = None
) -> RingLoop:
    """Bind the inbox and connect to the peers of the next role. Raises ServiceError naming the setting at fault."""
    if not config.inbox:
        raise bad_setting("inbox", "is needed with --role: where this process listens, tcp://host:port or ipc://path")
    tables = {
        Role.GATEWAY: config.gateway_peers,
        Role.TOKENIZER: config.tokenizer_peers,
        Role.DETOKENIZER: config.detokenizer_peers,
    }
    following = NEXT[role]
    if following is Role.ENGINE:
        peers = {name: entry.address for name, entry in engines.items()}
    else:
        peers = parse_peers(following, tables[following])
    if not peers:
        raise bad_setting(f"{following}_peers", f"is needed by a {role}: id=address of every {following}")
    plain = [address for address in (config.inbox, *peers.values()) if address.startswith("tcp://")]
    if plain and not config.ring_keys:
        raise bad_setting("ring_keys", f"is needed for {plain[0]}: TCP is always encrypted; `sluice keys` makes them")
    keys = load_keys(config.ring_keys, process_id) if plain else None
    # A prompt's bytes can become four bytes each as token ids; everything else is far smaller.
    max_message_bytes = MIN_MESSAGE_BYTES + 4 * config.max_prompt_bytes
    if images is not None:  # as files, and as pixels
        max_message_bytes += images.max_images * max(FILE_LIMITS.max_bytes, images.most_bytes)
    try:
        return RingLoop(role, process_id, config.inbox, peers, max_message_bytes, keys)
    except (zmq.ZMQError, OSError) as error:
        raise bad_setting("inbox", f"cannot listen on {config.inbox}: {error.strerror}") from error


def leave_if_changed(contents: CheckpointFiles) -> None:
    """End this process if its model files were replaced since it read them. Called when the ring's processes serve
    different revisions. Raises SystemExit EXIT_OUTDATED, and the supervisor starts the process again with the new
    files."""
    if contents.is_changed():
        path = contents.path
        logger.warning("%s was replaced since this process read it, and others serve another revision: ending", path)
        raise SystemExit(EXIT_OUTDATED)


def open_heart(config: ServiceConfig, process_id: str) -> Heartbeat:
    """Returns the heartbeat file. Raises ServiceError if its directory cannot be used."""
    try:
        return Heartbeat(config.heartbeat_dir, process_id)
    except OSError as error:
        raise bad_setting("heartbeat_dir", f"cannot write to {config.heartbeat_dir}: {error.strerror}") from error
