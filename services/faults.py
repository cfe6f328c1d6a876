"""Makes the INTERNAL error of a request and its log line. All such errors are made here.

The log line has the request, its trace, the role at fault and the traceback. The client gets the role, and the trace or
request id to look for in the log; never an exception's text, which may hold addresses or other clients' data
(CVE-2026-22778).
"""

import logging
from collections.abc import Mapping

from sluice_server.engine.errors import ServiceError, engine_fault
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import FIELDS

NAMES = ("trace_id", "request_id")  # what to look for in the log, the first that there is
logger = logging.getLogger(__name__)


def fault(
    role: Role, extra: Mapping[str, Mapping[str, object]], what: str, cause: BaseException | None = None
) -> ServiceError:
    """Log a fault, and return the error that its request ends with. `extra` is the log line's `extra` (see
    `logs.about`); `what` is a fixed text that follows the role: "failed while …"."""
    line = {FIELDS: {**extra[FIELDS], "role": str(role)}}
    # Logged with the caller's line, by which kinds of errors are distinguished.
    logger.error("the %s %s", role, what, exc_info=cause, extra=line, stacklevel=2)
    return _failure(role, what, extra[FIELDS])


def plugin_fault(role: Role, extra: Mapping[str, Mapping[str, object]], error: ServiceError) -> ServiceError:
    """Log the failure of a plugin and return its error, whose text names the plugin, with the request to look for."""
    line = {FIELDS: {**extra[FIELDS], "role": str(role)}}
    logger.error("%s", error.message, exc_info=error.__cause__, extra=line, stacklevel=2)
    error.details |= {"role": str(role), **{name: str(extra[FIELDS][name]) for name in NAMES if name in extra[FIELDS]}}
    return error


def operation_fault(process_id: str, work: str, cause: Exception) -> ServiceError:
    """Log the failure of an operation, which belongs to no request, and return its error."""
    logger.error("%s failed in a %s", process_id, work, exc_info=cause, stacklevel=2)
    return engine_fault(f"{process_id} failed in this operation; its log has the details")


def _failure(role: Role, what: str, about: Mapping[str, object]) -> ServiceError:
    """Returns the error for the client."""
    for name in NAMES:
        if name in about:
            found = str(about[name])
            error = engine_fault(f"the {role} {what} ({name.removesuffix('_id')} {found})")
            error.details = {"role": str(role), name: found}
            return error
    error = engine_fault(f"the {role} {what}")
    error.details = {"role": str(role)}
    return error
