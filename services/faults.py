"""The one place that makes an INTERNAL error of a request, and writes the line in the log about it.

The log has the request, its trace, the role at fault and the traceback. The client is told the role, and the trace or
request to look for there; never an exception's own text, which may hold addresses or others' data (CVE-2026-22778).
"""

import logging
from collections.abc import Mapping

from sluice_server.engine.errors import ServiceError, engine_fault
from sluice_server.services.messages.messages import Role
from sluice_server.services.telemetry.logs import FIELDS

logger = logging.getLogger(__name__)


def fault(
    role: Role, told: Mapping[str, Mapping[str, object]], what: str, cause: BaseException | None = None
) -> ServiceError:
    """The error that a request ends with; `told` is what the line is about (see `logs.about`), `what` a fixed text of
    ours that follows the role: "failed while …"."""
    line = {FIELDS: {**told[FIELDS], "role": str(role)}}
    # Of the caller's line: kinds of faults are told apart by it.
    logger.error("the %s %s", role, what, exc_info=cause, extra=line, stacklevel=2)
    return _told(role, what, told[FIELDS])


def _told(role: Role, what: str, about: Mapping[str, object]) -> ServiceError:
    """What a client is told."""
    for name in ("trace_id", "request_id"):
        if name in about:
            found = str(about[name])
            error = engine_fault(f"the {role} {what} ({name.removesuffix('_id')} {found})")
            error.details = {"role": str(role), name: found}
            return error
    error = engine_fault(f"the {role} {what}")
    error.details = {"role": str(role)}
    return error
