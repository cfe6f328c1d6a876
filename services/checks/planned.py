"""Has the memory of models planned before their processes start, by a process of its own that loads torch."""

import subprocess
import sys
from collections.abc import Sequence
from subprocess import PIPE

import msgspec

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.worker.host.aside import lower
from sluice_server.services.config import ServiceConfig
from sluice_server.services.memory.control_group import ControlGroup
from sluice_server.services.process.model_table import UNPLANNED, LaneEntry, PlannedBytes, with_options

COMMAND = (sys.executable, "-m", "sluice_server.services.engine.planning")
PLAN_S = 120.0
TOKENIZER_BYTES = 128 << 20  # with the children that render templates
DETOKENIZER_BYTES = 96 << 20
FRONT_BYTES = 160 << 20  # of a gateway, or an edge
SUPERVISOR_BYTES = 64 << 20
TEMPLATE_BYTES = 32 << 20  # of both templates alone: the rest they share with what they fork, of which it is planned
LAST_WORDS = 500  # characters that are shown of what a process said that failed


class AskedPlan(msgspec.Struct, frozen=True):
    """A model whose memory is to be planned.

    Attributes:
        source: its directory or GGUF file.
        engines: how many of them.
        other_bytes: what the other processes of its lane take.
        budget: bytes for all models of the service.
    """

    engine: EngineConfig
    source: str
    max_prompt_bytes: int
    engines: int
    other_bytes: int
    budget: int


class AnsweredPlan(msgspec.Struct, frozen=True):
    """The memory of a model, or the error: why it is not known."""

    planned: PlannedBytes = UNPLANNED
    code: int = 0
    reason: str = ""
    message: str = ""
    field: str = ""


def budget_of(service: ServiceConfig) -> int:
    """Returns the bytes that a service may take: those of the setting, else the limit of this process's control group,
    else the machine's memory."""
    return service.memory_budget or ControlGroup().read().limit


def front_bytes(service: ServiceConfig) -> int:
    """Returns what the processes of a service take that belong to no model."""
    templates = TEMPLATE_BYTES if service.process_templates else 0
    return SUPERVISOR_BYTES + templates + service.gateways * FRONT_BYTES * (2 if service.http else 1)


def with_plans(engine: EngineConfig, service: ServiceConfig, entries: Sequence[LaneEntry]) -> list[LaneEntry]:
    """Returns lanes with the memory that they may take; `engine` and `service` are the settings of the service. Takes a
    second or two. Raises ServiceError for the first that cannot be planned."""
    budget = budget_of(service)
    plans = _ask([_asked(*with_options(engine, service, entry), entry, budget) for entry in entries])
    return [msgspec.structs.replace(entry, planned=plan) for entry, plan in zip(entries, plans, strict=True)]


def _asked(engine: EngineConfig, service: ServiceConfig, entry: LaneEntry, budget: int) -> AskedPlan:
    others = service.tokenizers * TOKENIZER_BYTES + service.detokenizers * DETOKENIZER_BYTES
    return AskedPlan(engine, entry.source, service.max_prompt_bytes, service.engines, others, budget)


def _ask(asked: list[AskedPlan]) -> list[PlannedBytes]:
    try:
        told = msgspec.json.encode(asked)
        with subprocess.Popen(COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE) as planning:
            lower(planning.pid)
            try:
                said, failed = planning.communicate(told, PLAN_S)
            finally:
                planning.kill()
        answers = msgspec.json.decode(said, type=list[AnsweredPlan])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(str(error)) from error
    except msgspec.DecodeError as error:
        raise _failed(failed.decode(errors="replace").strip()[-LAST_WORDS:]) from error
    for one in answers:
        if one.code:
            raise ServiceError(Code(one.code), one.reason, one.message, field=one.field)
    return [one.planned for one in answers]


def _failed(why: str) -> ServiceError:
    return ServiceError(Code.INTERNAL, "PLANNING_FAILED", f"the memory of the model could not be planned: {why}")
