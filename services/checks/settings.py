"""Checks all settings of a service and its engines."""

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.cache import check_cache
from sluice_server.services.checks.engine import check_engine
from sluice_server.services.checks.processes import check_engines, check_threads
from sluice_server.services.checks.service import check_service
from sluice_server.services.config import ServiceConfig


def check(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError naming the first setting that is out of range. Called before any process starts."""
    check_engines(engine, service)
    check_threads(engine, service)
    check_cache(engine)
    check_engine(engine)
    check_service(service)
