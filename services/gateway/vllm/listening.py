"""The listener of `vllm.grpc.engine`, beside that of the contract: its address, and who its callers are."""

import dataclasses
import functools
from collections.abc import Callable

from grpc_health.v1 import health

from sluice_server.services.gateway.access.identity import AccessPolicy, Identity, Scope
from sluice_server.services.gateway.calls import server
from sluice_server.services.gateway.calls.audit import audited
from sluice_server.services.gateway.calls.guard import Guard
from sluice_server.services.gateway.connections.listener import PortListener
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.gateway.vllm.service import SERVICE, VllmEngine
from sluice_server.services.process.listening import check_keyless, is_local
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.telemetry.observed import Observer


def listener(
    settings: GatewaySettings,
    access: WatchedFile[AccessPolicy] | None,
    clock: Callable[[], float],
    engine: VllmEngine,
    health: health.aio.HealthServicer,
    observer: Observer,
) -> PortListener:
    """Returns the listener. On this host it takes every caller, in plaintext, as `vllm_tenant`; elsewhere callers show
    a certificate, whose tenant the access file names, if there is one. Raises `ServiceError` for an address that other
    hosts reach without certificates."""
    of_this = listener_settings(settings)
    tenant = Identity(settings.vllm_tenant, frozenset(Scope))
    guard = audited(Guard(access if of_this.tls else None, clock, observer, keyless=tenant), settings, clock)
    services = server.Services([(SERVICE, engine.table())], observer)
    return PortListener(of_this, functools.partial(server.build, of_this, guard, services, health))


def listener_settings(settings: GatewaySettings) -> GatewaySettings:
    """Returns the settings of the listener. Raises `ServiceError` for an address that is not allowed."""
    listen = settings.vllm_listen
    has_client_ca = settings.tls is not None and settings.tls.client_ca is not None
    check_keyless("vllm_listen", listen, has_client_ca)
    tls = None if is_local(listen) else settings.tls
    return dataclasses.replace(settings, listen=listen, tls=tls, insecure=False, peer_socket="")
