"""Puts a process into a ring: reads the model's files, binds the inbox, connects to the processes of the next role.

A gateway is in one ring for each model; any other process is in one.
"""

import asyncio
import dataclasses
import logging

import zmq

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.plugins.entry_points import Plugins, find_plugins
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource, resolve_model
from sluice_server.services.config import ServiceConfig, bad_setting, parse_peers
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.media.serving import limits_for
from sluice_server.services.memory.watch import MemoryWatch
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.beats import Beats
from sluice_server.services.process.engine_table import EngineTable, engines_of
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.process.operations import Operations
from sluice_server.services.process.process import Process
from sluice_server.services.ring.keys import load_keys
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.peers import NEXT
from sluice_server.services.ring.transport import Transport
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

EXIT_OUTDATED = 75  # EX_TEMPFAIL: exit status of a process that is to be started again
MIN_MESSAGE_BYTES = 4 << 20  # for headers, and for what a prompt of the smallest allowed size can become


@dataclasses.dataclass(frozen=True, slots=True)
class Common:
    """What a process has once, however many rings it is in. See `Process`."""

    role: Role
    process_id: str
    tracer: Tracer
    metrics: Metrics
    heart: Heartbeat
    stopping: asyncio.Event
    beats: Beats
    memory: MemoryWatch | None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model say."""

    source: ModelSource
    contents: CheckpointFiles
    model: ModelConfig
    limits: Limits
    plugins: Plugins


def read_files(engine: EngineConfig, config: ServiceConfig, *, with_weights: bool) -> ModelFiles:
    """Reads the files of the model that the settings name, see `call_aside`. Raises ServiceError. May run in any
    thread."""
    return call_aside(lambda: _read_files(engine, config, with_weights=with_weights))


def _read_files(engine: EngineConfig, config: ServiceConfig, *, with_weights: bool) -> ModelFiles:
    source = resolve_model(config.model, config.revision)
    contents = CheckpointFiles(source, remembered(), with_weights=with_weights)
    plugins = find_plugins(engine.plugins)
    model = read_served(contents.directory, plugins.models)
    limits = limits_for(engine, model, contents.directory, config.max_prompt_bytes, plugins)
    return ModelFiles(source, contents, model, limits, plugins)


def join(
    engine: EngineConfig, config: ServiceConfig, files: ModelFiles, common: Common, shared: Transport | None = None
) -> Process:
    """Returns the process in the ring that the settings name; rings without keys use `shared`. Raises ServiceError
    naming the setting at fault."""
    engines = engines_of(config)
    ring = join_ring(config, common.role, common.process_id, engines.value, files.limits.images, shared)
    handlers = ring.handlers
    handlers.revision = files.contents.configuration
    handlers.on_mixed = lambda: leave_if_changed(files.contents)
    handlers.on_keep = common.tracer.keep
    process = Process(
        engine_config=engine,
        config=config,
        role=common.role,
        source=files.source,
        contents=files.contents,
        model=files.model,
        limits=files.limits,
        ring=ring,
        tracer=common.tracer,
        metrics=common.metrics,
        heart=common.heart,
        stopping=common.stopping,
        beats=common.beats,
        operations=Operations(common.process_id, ring.leases, ring.emit),
        memory=common.memory,
        plugins=files.plugins,
        engines=engines,
    )
    if common.role is Role.TOKENIZER:
        process.on_engines.append(lambda table: connect(ring, table))
    process.serve_profiles()
    return process


def connect(ring: RingLoop, engines: EngineTable) -> None:
    """Connect a tokenizer to the engines as they are now."""
    try:
        ring.change_peers({name: entry.address for name, entry in engines.items()})
    except ServiceError as error:
        logger.error("%s; the engines without a key get no requests from here", error.message)
    logger.info("the engines are %s from now on", ", ".join(sorted(engines)))


def join_ring(
    config: ServiceConfig,
    role: Role,
    process_id: str,
    engines: EngineTable,
    images: ImageForm | None = None,
    shared: Transport | None = None,
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
        transport = Transport(keys) if keys is not None else shared
        return RingLoop(role, process_id, config.inbox, peers, max_message_bytes, transport)
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
