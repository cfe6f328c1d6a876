"""The settings of a gateway, and of the models behind it, from its configuration and the models' files."""

import dataclasses
import logging
import resource
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import Limits
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles
from sluice_server.services.checkpoint.revisions import fits
from sluice_server.services.checks.service import check_keys
from sluice_server.services.config import ServiceConfig, parse_peers
from sluice_server.services.gateway.access.tls_files import files_of
from sluice_server.services.gateway.model import model_info
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.media.serving import limits_for
from sluice_server.services.media.urls import hosts_of
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.joining import ModelFiles
from sluice_server.services.process.listening import SOCKET_SUFFIX
from sluice_server.services.process.process import Process
from sluice_server.version import VERSION

logger = logging.getLogger(__name__)

IPC = "ipc://"
OTHER_FILES = 256  # reserved for the ring, logs and files that are read again
NO_MODEL = ModelInfo(id="", revision="", context_length=0)  # of a gateway before a model is opened


def model_of(name: str, files: ModelFiles, revision: str = "") -> ModelInfo:
    """Returns the `ModelInfo` of the model of these files, which requests call `name`, or else as its source."""
    name = name or files.source.name
    found = model_info(name, revision, files.source.label, files.contents.directory, files.model, files.limits)
    return dataclasses.replace(found, created_s=files.contents.written_s)


def read_model(process: Process, revision: str) -> tuple[ModelInfo, Limits] | None:
    """Returns the model and limits from this process's files as they are now; None if they are not of that revision."""
    config, engine, source, plugins = process.config, process.engine_config, process.source, process.plugins
    try:
        contents = CheckpointFiles(source, remembered())
        model = read_served(contents.directory, plugins.models)
        limits = limits_for(engine, model, contents.directory, config.max_prompt_bytes, plugins)
        files = ModelFiles(source, contents, model, limits, plugins)
        found = model_of(config.served_model_name, files, revision)
        contents.check()
    except ServiceError as error:  # the files are being replaced
        logger.warning("%s", error.message)
        return None
    return (found, limits) if fits(revision, contents.configuration) else None


def settings_of(engine: EngineConfig, config: ServiceConfig, gateway_id: str) -> GatewaySettings:
    """Returns the settings of a gateway without a model."""
    check_keys(config)
    max_connections = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return GatewaySettings(
        gateway_id=gateway_id,
        model=NO_MODEL,
        limits=Limits(context_length=0, vocab_size=0, max_prompt_bytes=config.max_prompt_bytes),
        listen=config.listen,
        tls=files_of(config.tls_cert, config.tls_key, config.tls_client_ca),
        insecure=config.insecure,
        vllm_listen=config.vllm_listen,
        vllm_tenant=config.vllm_tenant,
        kv_events=engine.kv_events,
        access_file=Path(config.access_file) if config.access_file else None,
        api_keys=config.api_key,
        num_gateways=config.gateways,
        peers={name: f"unix:{path}" for name, path in _peer_sockets(config).items()},
        peer_socket=_peer_sockets(config).get(gateway_id, ""),
        peer_secret=config.peer_secret,
        reflection=config.reflection,
        gateways=tuple(sorted(parse_peers(Role.GATEWAY, config.gateway_peers))),
        routing=config.routing,
        hedging_delay_s=config.hedging_delay_ms / 1000,
        recovery_timeout_s=config.recovery_timeout_s,
        model_wait_s=config.model_wait_s,
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
        audit_log=config.audit_log,
        reuse_port=config.gateways > 1,
    )


def lane_settings_of(front: GatewaySettings, process: Process, model: ModelInfo) -> GatewaySettings:
    """Returns the settings of a model's lane, whose ring `process` is in."""
    return dataclasses.replace(
        front,
        model=model,
        limits=process.limits,
        epoch=process.ring.epoch,
        stages=stages_of(process),
        routing=process.config.routing,
        kv_events=process.engine_config.kv_events,
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
