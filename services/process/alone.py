"""Runs one process of a service by its settings, and records why it ended."""

import os

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.cache import refuse_auto
from sluice_server.services.checks.processes import check_roles, check_threads
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process import exit_reason
from sluice_server.services.process.roles import run_role
from sluice_server.services.process.supervised import SUPERVISOR_PID


def run_alone(engine: EngineConfig, service: ServiceConfig) -> int:
    """Run the process until it is asked to stop. Returns its exit status. Raises ServiceError for unusable settings."""
    name, is_supervised = service.process_id or f"{service.role}-0", SUPERVISOR_PID in os.environ
    with exit_reason.recorded_in(service.heartbeat_dir, name, is_supervised=is_supervised):
        refuse_auto(engine)
        check_threads(engine, service)
        check_roles(engine, service)
        return run_role(engine, service)
