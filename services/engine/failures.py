"""The errors that clients get for requests that failed in the engine: unexpected ones are logged, and say nothing."""

from sluice_server.engine.errors import PROCESSOR_FAILED, Code, ServiceError
from sluice_server.services.faults import fault, plugin_fault
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import about


def told_to_client(envelope: Envelope, error: ServiceError) -> ServiceError:
    """Returns the error as the client gets it; logs one that is this server's fault or a plugin's."""
    if error.reason == PROCESSOR_FAILED:
        return plugin_fault(Role.ENGINE, about(envelope), error)
    if error.code is Code.INTERNAL:
        return fault(Role.ENGINE, about(envelope), "failed while computing this request", error.__cause__)
    return error
