"""The gateway process: builds the settings from the configuration and runs the server until it is drained."""

import asyncio
import contextlib
import dataclasses
import logging
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice_server.engine.errors import ServiceError, stage_lost
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import Limits
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles
from sluice_server.services.checkpoint.revisions import fits
from sluice_server.services.checks.service import check_keys
from sluice_server.services.config import ServiceConfig, parse_peers
from sluice_server.services.gateway.access.tls_files import files_of
from sluice_server.services.gateway.connections.memory import share_one_heap
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.model import model_info
from sluice_server.services.gateway.models.lane import Lane, Ring
from sluice_server.services.gateway.requests.fetching import ImageFetches
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.media.fetch_workers import FetchWorkers
from sluice_server.services.media.serving import limits_for
from sluice_server.services.media.urls import hosts_of
from sluice_server.services.messages.messages import KeepTrace
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import absences
from sluice_server.services.process.listening import SOCKET_SUFFIX, bound
from sluice_server.services.process.process import Process
from sluice_server.services.process.supervised import say_engines, say_ready
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.request_log import RequestLog
from sluice_server.version import VERSION

logger = logging.getLogger(__name__)

IPC = "ipc://"
FIRST = "m0"  # the lane of the model that the settings name
FETCHES = 2  # images that are fetched at once
OTHER_FILES = 256  # reserved for the ring, logs and files that are read again


async def run(process: Process) -> int:
    """Serves until the process is told to stop, then drains; returns the exit status. Raises ServiceError
    LISTEN_FAILED."""
    share_one_heap()  # before grpc starts its threads
    config, ring = process.config, process.ring
    log = RequestLog(is_on=config.log_requests, shows_prompts=config.log_prompts)
    observer = GatewayObserver(process.tracer, process.metrics, lambda envelope: ring.emit(KeepTrace(envelope)), log)
    settings = settings_of(process)
    gateway = Gateway(settings, observer)
    lane = gateway.open(
        FIRST,
        settings,
        Ring(ring.emit, lambda: ring.inbox.counts["lost"], lambda revision: read_model(process, revision)),
    )
    with contextlib.ExitStack() as closing:
        _fetch_images(gateway, hosts_of(config.media_from), closing)
        return await _serve(process, gateway, lane)


async def _serve(process: Process, gateway: Gateway, lane: Lane) -> int:
    config, ring = process.config, process.ring
    lane.on_serving = lambda: say_serving(
        ring.process_id, bound(config.listen, gateway.port), lane.manager.settings.model.revision
    )
    lane.on_engines = lambda serving, drained: say_engines(ring.process_id, serving, drained)
    lane.change_engines(process.engines.value)  # some may be draining
    process.on_engines.append(lane.change_engines)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: lane.lost(absent_of(config)))
    loop.add_signal_handler(signal.SIGUSR2, lambda: lane.lost(absent_of(config), planned=True))
    loop.add_signal_handler(signal.SIGQUIT, lambda: end_at_once(gateway, process.stopping))
    if process.memory is not None:
        watch = process.memory
        gateway.memory_level = lambda: watch.level
    process.start(lane)
    process.metrics.collect_from(lambda: figures(gateway))
    await gateway.start()
    await process.stopping.wait()
    await gateway.stop(config.grace_s)
    return 0


def _fetch_images(gateway: Gateway, hosts: frozenset[str], closing: contextlib.ExitStack) -> None:
    """Has the gateway fetch images by their URLs, if there are hosts to fetch them from."""
    if not hosts:
        return
    workers = closing.enter_context(contextlib.closing(FetchWorkers(hosts, FETCHES)))
    executor = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
    closing.callback(executor.shutdown, cancel_futures=True)
    on_loop = asyncio.get_running_loop().call_soon_threadsafe
    gateway.books.fetches = ImageFetches(workers.fetch, executor, on_loop)


def absent_of(config: ServiceConfig) -> frozenset[str]:
    """Returns the ids of processes that the supervisor has found gone; none if it does not say."""
    return absences.read(Path(config.heartbeat_dir)) if config.heartbeat_dir else frozenset()


def end_at_once(gateway: Gateway, stopping: asyncio.Event) -> None:
    """Ends open requests as UNAVAILABLE at once (SIGQUIT: the service ends and cannot finish anything). Clients get a
    status with a message, not a broken connection."""
    gateway.end_all(stage_lost("serving"))
    stopping.set()


def figures(gateway: Gateway) -> list[MetricSample]:
    """Returns the metrics that the gateway itself measures: open requests, reserved tokens, gaps between tokens."""
    managers = [lane.manager for lane in gateway.models]
    return [
        MetricSample(catalogue.OPEN, sum(len(one.requests) for one in managers)),
        MetricSample(catalogue.RESERVED, gateway.books.admission.num_tokens),
        MetricSample(catalogue.GAP, gateway.books.gaps.snapshot()),
        *[
            MetricSample(catalogue.ROUTED, num, way)
            for one in managers
            for way, num in list(one.engines.routed.items())
        ],
    ]


def say_serving(process_id: str, address: str, revision: str) -> None:
    """Reports to the log, and to the supervisor if there is one, that requests of a revision are admitted."""
    logger.info("serving revision %s on %s", revision, address)
    say_ready(process_id, f"{address} {revision}")


def model_of(process: Process, contents: CheckpointFiles, model: ModelConfig, revision: str) -> ModelInfo:
    """Returns the `ModelInfo` of the model whose files are `contents`."""
    name = process.config.served_model_name or process.source.name
    limits = limits_of(process, contents, model)
    found = model_info(name, revision, process.source.label, contents.directory, model, limits)
    return dataclasses.replace(found, created_s=contents.written_s)


def limits_of(process: Process, contents: CheckpointFiles, model: ModelConfig) -> Limits:
    """Returns the limits of requests to the model whose files are `contents`."""
    most = process.config.max_prompt_bytes
    return limits_for(process.engine_config, model, contents.directory, most, process.plugins)


def read_model(process: Process, revision: str) -> tuple[ModelInfo, Limits] | None:
    """Returns the model and limits from this process's files as they are now; None if they are not of that revision."""
    try:
        contents = CheckpointFiles(process.source, remembered())
        model = read_served(contents.directory, process.plugins.models)
        found = model_of(process, contents, model, revision)
        contents.check()
    except ServiceError as error:  # the files are being replaced
        logger.warning("%s", error.message)
        return None
    if not fits(revision, contents.configuration):
        return None
    return found, limits_of(process, contents, model)


def settings_of(process: Process) -> GatewaySettings:
    """Builds the gateway's settings from the configuration and the model."""
    config = process.config
    check_keys(config)
    max_connections = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return GatewaySettings(
        gateway_id=process.ring.process_id,
        model=model_of(process, process.contents, process.model, ""),
        limits=process.limits,
        listen=config.listen,
        tls=files_of(config.tls_cert, config.tls_key, config.tls_client_ca),
        insecure=config.insecure,
        vllm_listen=config.vllm_listen,
        vllm_tenant=config.vllm_tenant,
        kv_events=process.engine_config.kv_events,
        access_file=Path(config.access_file) if config.access_file else None,
        api_keys=config.api_key,
        num_gateways=config.gateways,
        peers={name: f"unix:{path}" for name, path in _peer_sockets(config).items()},
        peer_socket=_peer_sockets(config).get(process.ring.process_id, ""),
        peer_secret=config.peer_secret,
        reflection=config.reflection,
        epoch=process.ring.epoch,
        stages=stages_of(process),
        gateways=tuple(sorted(parse_peers(Role.GATEWAY, config.gateway_peers))),
        routing=config.routing,
        hedging_delay_s=config.hedging_delay_ms / 1000,
        recovery_timeout_s=config.recovery_timeout_s,
        version=VERSION,
        trust_chat_content=config.trust_chat_content,
        trust_request_chat_template=config.trust_request_chat_template,
        media_hosts=hosts_of(config.media_from),
        image_store_bytes=config.image_store_bytes,
        max_open_image_bytes=config.max_open_image_bytes,
        max_open_requests=config.max_open_requests,
        max_concurrent_streams=max(2048, 2 * config.max_open_requests),  # admission refuses, streams do not queue
        max_connections=max_connections,
        max_connections_per_address=max_connections // 2,
        probe_interval_s=config.probe_interval_s,
        probe_timeout_s=config.probe_timeout_s,
        grace_s=config.grace_s,
        max_connection_age_s=config.max_connection_age_s,
        reuse_port=config.gateways > 1,
    )


def most_connections(max_files: int) -> int:
    """Returns how many of a process's `max_files` may be client connections; the rest is reserved for other files."""
    return max(max_files // 2, max_files - OTHER_FILES) if max_files > 0 else 1 << 20


def _peer_sockets(config: ServiceConfig) -> dict[str, str]:
    """Returns the Unix sockets on which gateways of one host reach each other, and edges reach them. They lie beside
    the inboxes, in a private directory."""
    peers = parse_peers(Role.GATEWAY, config.gateway_peers)
    return {
        name: address.removeprefix(IPC) + SOCKET_SUFFIX
        for name, address in peers.items()
        if address.startswith(IPC) and (config.peer_secret or config.http)
    }


def stages_of(process: Process) -> tuple[tuple[str, ...], ...]:
    """Returns the ids of tokenizers, engines and detokenizers, each sorted: all processes use this order."""
    config = process.config
    tokenizers = parse_peers(Role.TOKENIZER, config.tokenizer_peers)
    detokenizers = parse_peers(Role.DETOKENIZER, config.detokenizer_peers)
    return tuple(tuple(sorted(names)) for names in (tokenizers, process.engines.value, detokenizers))
