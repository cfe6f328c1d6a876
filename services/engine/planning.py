"""Runs as a process of its own and plans the memory of models: one line of JSON in, one out.

Gateways and the supervisor have it started (`services.checks.planned`), as only the engine's code knows the formats of
weights and cache that this machine takes.
"""

import sys
from pathlib import Path

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.engine.worker.startup.planned import plan_memory
from sluice_server.services.checkpoint.model_source import directory_of, resolve_draft
from sluice_server.services.checks.planned import AnsweredPlan, AskedPlan
from sluice_server.services.media.serving import limits_for
from sluice_server.services.process.model_table import PlannedBytes


def plan(asked: AskedPlan) -> AnsweredPlan:
    """Returns what the processes of a model may take, or why that is not known."""
    try:
        return AnsweredPlan(_planned(asked))
    except ServiceError as error:
        return AnsweredPlan(code=int(error.code), reason=error.reason, message=error.message, field=error.field)


def _planned(asked: AskedPlan) -> PlannedBytes:
    config, directory = asked.engine, directory_of(Path(asked.source))
    plugins = find_plugins(config.plugins)
    model = read_served(directory, plugins.models)
    limits = limits_for(config, model, directory, asked.max_prompt_bytes, plugins)
    draft = resolve_draft(config.draft_model, config.speculation).directory if config.draft_model else None
    found = plan_memory(config, (model, directory), limits, draft, asked.budget)
    num = asked.engines
    return PlannedBytes(
        weights=num * found.weights,
        cache=num * found.cache,
        workspace=num * found.workspace + asked.other_bytes,
        tiers=num * found.tiers,
        cache_tokens=found.cache_tokens,
    )


def main() -> None:
    """Answers what was asked on standard input."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[AskedPlan])
    sys.stdout.buffer.write(msgspec.json.encode([plan(one) for one in asked]))


if __name__ == "__main__":
    main()
