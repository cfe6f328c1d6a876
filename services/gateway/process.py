"""The gateway process: settings from the configuration, the server's life from start to drained."""

import asyncio
import logging
import os
from importlib import metadata
from pathlib import Path

from engine.errors import stage_lost
from engine.request import SamplingParams
from services.config import ServiceConfig, parse_peers
from services.gateway.gateway import Gateway
from services.gateway.neighbours import SOCKET_SUFFIX
from services.gateway.settings import GatewaySettings, ModelInfo
from services.gateway.stage import GatewayStage
from services.gateway.tls import files_of
from services.listening import bound
from services.messages import Role
from services.process import Process
from services.telemetry.observer import GatewayObserver

logger = logging.getLogger(__name__)

READY_FD = "SLUICE_READY_FD"  # an inherited pipe; one line is written there once requests are let in
POLL_S = 0.005
IPC = "ipc://"


async def run(process: Process) -> int:
    """Serve until told to stop, then drain; 1 if another stage was lost. Raises ServiceError LISTEN_FAILED."""
    observer = GatewayObserver(process.tracer, process.metrics)
    gateway = Gateway(settings_of(process), process.ring.emit, observer)
    process.start(GatewayStage(gateway))
    process.metrics.collect_from(lambda: {"sluice_requests_open": len(gateway.desk.requests)})
    port = await gateway.start()
    tasks = [
        asyncio.create_task(_say_ready(gateway, bound(process.config.listen, port))),
        asyncio.create_task(process.stopping.wait()),
        asyncio.create_task(process.lost.wait()),
    ]
    await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if process.lost.is_set():
        gateway.fail_all(stage_lost("serving"))
        await gateway.stop(0.0)
        return 1
    await gateway.stop(process.config.grace_s)
    return 0


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
        routes=routes_of(process),
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


def routes_of(process: Process) -> tuple[tuple[str, ...], ...]:
    """Ways round the ring that together visit every process: one for each of the most numerous role."""
    config = process.config
    tables = [
        sorted(parse_peers(Role.TOKENIZER, config.tokenizer_peers)),
        sorted(parse_peers(Role.ENGINE, config.engine_peers)),
        sorted(parse_peers(Role.DETOKENIZER, config.detokenizer_peers)),
    ]
    return tuple(tuple(ids[i % len(ids)] for ids in tables) for i in range(max(map(len, tables))))


async def _say_ready(gateway: Gateway, address: str) -> None:
    """Tell the log, and the supervisor if there is one, once requests are let in."""
    while not gateway.is_serving:
        await asyncio.sleep(POLL_S)
    logger.info("serving on %s", address)
    if READY_FD in os.environ:
        os.write(int(os.environ[READY_FD]), f"ready {address}\n".encode())
