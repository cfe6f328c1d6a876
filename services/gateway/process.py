"""The gateway process: settings from the configuration, the server's life from start to drained."""

import asyncio
import logging
import os
import signal
from importlib import metadata
from pathlib import Path

from engine.request import SamplingParams
from services.config import ServiceConfig, parse_peers
from services.gateway.access.tls import files_of
from services.gateway.calls.neighbours import SOCKET_SUFFIX
from services.gateway.gateway import Gateway
from services.gateway.memory import share_one_heap
from services.gateway.settings import GatewaySettings, ModelInfo
from services.gateway.stage import GatewayStage
from services.listening import bound
from services.messages import Keep, Role
from services.process import Process
from services.telemetry import catalogue
from services.telemetry.metrics import Sample
from services.telemetry.observer import GatewayObserver
from services.telemetry.request_log import RequestLog
from services.text_bound import longest_token

logger = logging.getLogger(__name__)

READY_FD = "SLUICE_READY_FD"  # an inherited pipe; a line is written there whenever requests are let in again
IPC = "ipc://"


async def run(process: Process) -> int:
    """Serve until told to stop, then drain; the exit status. Raises ServiceError LISTEN_FAILED."""
    share_one_heap()  # before grpc starts its threads
    config, ring = process.config, process.ring
    log = RequestLog(is_on=config.log_requests, shows_prompts=config.log_prompts)
    observer = GatewayObserver(process.tracer, process.metrics, lambda envelope: ring.emit(Keep(envelope)), log)
    gateway = Gateway(settings_of(process), ring.emit, observer, lost_frames=lambda: ring.inbox.counts["lost"])
    gateway.on_serving = lambda port: say_ready(ring.process_id, bound(config.listen, port))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, gateway.stage_lost)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: gateway.stage_lost(planned=True))
    process.start(GatewayStage(gateway))
    process.metrics.collect_from(lambda: figures(gateway))
    await gateway.start()
    await process.stopping.wait()
    await gateway.stop(config.grace_s)
    return 0


def figures(gateway: Gateway) -> list[Sample]:
    """What the gateway keeps for itself."""
    desk = gateway.desk
    return [
        Sample(catalogue.OPEN, len(desk.requests)),
        Sample(catalogue.RESERVED, desk.admission.num_tokens),
        Sample(catalogue.GAP, desk.gaps.snapshot()),
    ]


def say_ready(process_id: str, address: str) -> None:
    """Tell the log, and the supervisor if there is one, that requests are let in."""
    logger.info("serving on %s", address)
    if READY_FD in os.environ:
        os.write(int(os.environ[READY_FD]), f"ready {process_id} {address}\n".encode())


def settings_of(process: Process) -> GatewaySettings:
    """The gateway's own view of the configuration and the model."""
    config, model, defaults = process.config, process.model, process.model.defaults
    return GatewaySettings(
        gateway_id=process.ring.process_id,
        model=ModelInfo(
            id=config.served_model_name or process.source.name,
            revision=process.source.revision,
            context_length=process.limits.context_length,
            eos_ids=model.eos_ids,
            defaults=SamplingParams(
                temperature=1.0 if defaults.temperature is None else defaults.temperature,
                top_k=defaults.top_k or 0,
                top_p=1.0 if defaults.top_p is None else defaults.top_p,
                min_p=defaults.min_p or 0.0,
            ),
            architecture=model.architecture,
            longest_token=longest_token(process.source.directory / "tokenizer.json"),
        ),
        limits=process.limits,
        listen=config.listen,
        tls=files_of(config.tls_cert, config.tls_key, config.tls_client_ca),
        insecure=config.insecure,
        access_file=Path(config.access_file) if config.access_file else None,
        num_gateways=config.gateways,
        neighbours={name: f"unix:{path}" for name, path in _peer_sockets(config).items()},
        peer_socket=_peer_sockets(config).get(process.ring.process_id, ""),
        peer_secret=config.peer_secret,
        reflection=config.reflection,
        epoch=process.ring.epoch,
        stages=stages_of(config),
        recovery_timeout_s=config.recovery_timeout_s,
        version=metadata.version("sluice"),
        max_open_requests=config.max_open_requests,
        max_concurrent_streams=max(2048, 2 * config.max_open_requests),  # admission refuses, streams do not queue
        probe_interval_s=config.probe_interval_s,
        probe_timeout_s=config.probe_timeout_s,
        grace_s=config.grace_s,
        max_connection_age_s=config.max_connection_age_s,
        reuse_port=config.gateways > 1,
    )


def _peer_sockets(config: ServiceConfig) -> dict[str, str]:
    """Where gateways of one host reach each other: beside their inboxes, which are in a private directory."""
    peers = parse_peers(Role.GATEWAY, config.gateway_peers)
    return {
        name: address.removeprefix(IPC) + SOCKET_SUFFIX
        for name, address in peers.items()
        if address.startswith(IPC) and config.peer_secret
    }


def stages_of(config: ServiceConfig) -> tuple[tuple[str, ...], ...]:
    """Ids of the tokenizers, engines and detokenizers, in the order that every process uses."""
    tables = {
        Role.TOKENIZER: config.tokenizer_peers,
        Role.ENGINE: config.engine_peers,
        Role.DETOKENIZER: config.detokenizer_peers,
    }
    return tuple(tuple(sorted(parse_peers(role, table))) for role, table in tables.items())
