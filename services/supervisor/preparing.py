"""Checks the settings of a service and finds its models, before anything starts."""

import dataclasses
import secrets
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checkpoint.model_source import DEMO, directory_of, resolve_model
from sluice_server.services.checkpoint.packaged import SMOLLM2
from sluice_server.services.checks.models import check_files
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig, bad_setting
from sluice_server.services.gateway.access.identity import access_of, as_digest, read_access
from sluice_server.services.gateway.access.tls_files import files_of
from sluice_server.services.process.edge_settings import check_http
from sluice_server.services.process.free_address import free_address
from sluice_server.services.process.listening import UNIX, check_plaintext, check_vllm, split
from sluice_server.services.ranks.settings import check_ranks
from sluice_server.services.supervisor.block_size import with_any_size, with_block_size
from sluice_server.services.supervisor.complaints import complain
from sluice_server.services.supervisor.first_models import of_file, of_one
from sluice_server.services.supervisor.prepared import Prepared

EMBEDDED = (
    f"\nsluice: {DEMO} is the embedded model, which completes Python, badly; --model takes {SMOLLM2}, a checkpoint "
    "directory, a GGUF file or a hub id"
)


def prepare(engine: EngineConfig, service: ServiceConfig) -> Prepared:
    """Returns the service of these settings, ready to be started. Raises ServiceError."""
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
    check_apart(service)
    service = dataclasses.replace(
        service,
        listen=free_address(service.listen),
        http=free_address(service.http, "http") if service.http else "",
        vllm_listen=free_address(service.vllm_listen, "vllm_listen") if service.vllm_listen else "",
        api_key=tuple(map(as_digest, service.api_key)),  # the processes need no key itself
        peer_secret=service.peer_secret or (secrets.token_hex(32) if service.gateways > 1 else ""),
    )
    if service.models:
        return Prepared(engine, service, of_file(engine, service, complain), service.models)
    source, is_embedded = resolve_model(service.model, service.revision), service.model == DEMO
    check_files(source.directory, engine, service)
    service = dataclasses.replace(
        service,
        model=str(source.path),
        revision=source.label,
        served_model_name=service.served_model_name or source.name,
    )
    engine, service = with_block_size(wanted, service, source.directory, complain)
    files = str(directory_of(Path(service.model)))
    return Prepared(engine, service, of_one(service), files, EMBEDDED if is_embedded else "")


def check_apart(service: ServiceConfig) -> None:
    """Checks that no two servers are to listen at one address. Raises ServiceError."""
    taken: dict[str, str] = {}
    for setting in ("listen", "http", "vllm_listen"):
        address = getattr(service, setting)
        if address in taken:
            raise bad_setting(setting, f"{address} is that of --{taken[address]} as well; give each a port of its own")
        if address and not address.endswith(":0"):
            taken[address] = setting


def check_access(service: ServiceConfig) -> None:
    """Check keys, access file and certificate once, before any process starts. Raises ServiceError."""
    access_of(service.api_key)
    if service.access_file:
        read_access(Path(service.access_file))
    files = files_of(service.tls_cert, service.tls_key, service.tls_client_ca)
    if files is not None:
        from sluice_server.services.gateway.access.tls import read  # loads grpc, which is needed for this only

        read(files)
