"""The scheduler's settings beside batch size and token budget: frozen values with defaults."""

import dataclasses
import math
from collections.abc import Mapping

from sluice_server.engine.config import DEFAULTS, EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.scheduler.costs import PreemptionCosts


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How requests are ordered, admitted, paused and preempted.

    Attributes:
        policy: a name of `policies.POLICIES`.
        ageing_s: policy priority: seconds of waiting that outweigh one level of priority.
        starvation_s: policy sjf: a request is never overtaken by one that arrives so many seconds later.
        tenant_weights: policy fair: a tenant's share of the service; 1 where it has no entry.
        max_queued_requests: waiting requests at most; more are refused.
        max_queued_tokens: prompt tokens of waiting requests at most.
        watermark: share of the cache's blocks that predictions leave free at admission; below 0, more is admitted than
            is predicted to fit.
        max_overtakes: later requests that may be admitted before one that did not fit.
        max_preemptions: after so many, a sequence with work is preempted only as a last resort.
        max_long_prefills: prompts longer than a step's budget that are computed at the same time.
        max_pooling_tokens: prompt tokens of pooled requests in a step that also decodes, at most; 0 is no such limit.
        pause_hold_s: seconds that a paused request keeps its blocks when no other request needs them.
        max_draft_tokens: drafts per sequence and step at most; 0 is no speculation.
        max_draft_width: drafts that may follow the same token; 1 is a chain.
        drafts_forced: only outputs under a grammar are drafted for, and prompts are not read for that.
        adapts_drafts: measured costs and acceptance decide the length of drafts; else they are as long as they may be.
        adapter_turn_s: seconds that a request waits for its adapter before others have to make room for it.
        num_stages: stages of a pipeline, each of which computes another step; work is shared out among so many.
        costs: rates of moving blocks and of computing tokens; None without a lower tier.
    """

    policy: str = DEFAULTS.scheduling_policy
    ageing_s: float = DEFAULTS.priority_ageing_s
    starvation_s: float = DEFAULTS.starvation_bound_s
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_queued_requests: int = DEFAULTS.max_queued_requests
    max_queued_tokens: int = DEFAULTS.max_queued_tokens
    watermark: float = DEFAULTS.admission_watermark
    max_overtakes: int = 64
    max_preemptions: int = 2
    max_long_prefills: int = 4
    max_pooling_tokens: int = DEFAULTS.max_num_pooling_tokens
    pause_hold_s: float = DEFAULTS.pause_hold_s
    max_draft_tokens: int = 0
    max_draft_width: int = DEFAULTS.max_draft_width
    drafts_forced: bool = False
    adapts_drafts: bool = True
    adapter_turn_s: float = DEFAULTS.adapter_turn_s
    num_stages: int = 1
    costs: PreemptionCosts | None = None


def settings_of(config: EngineConfig, costs: PreemptionCosts | None = None, num_stages: int = 1) -> SchedulerSettings:
    """Returns the scheduler's part of the engine's settings. Raises ServiceError for malformed weights."""
    return SchedulerSettings(
        policy=config.scheduling_policy,
        ageing_s=config.priority_ageing_s,
        starvation_s=config.starvation_bound_s,
        tenant_weights=parse_weights(config.tenant_weights),
        watermark=config.admission_watermark,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_pooling_tokens=config.max_num_pooling_tokens,
        pause_hold_s=config.pause_hold_s,
        max_draft_tokens=0 if config.speculation == "none" else config.max_draft_tokens,
        max_draft_width=config.max_draft_width,
        drafts_forced=config.speculation == "grammar",
        adapts_drafts=config.draft_length == "adaptive",
        adapter_turn_s=config.adapter_turn_s,
        num_stages=num_stages,
        costs=costs,
    )


def parse_weights(text: str) -> dict[str, float]:
    """Parses tenants' weights from "tenant=weight,…". Raises ServiceError naming the flag and the entry at fault."""
    weights: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        tenant, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (tenant and 0 < weight < math.inf):
            raise _bad_weight(f"{entry!r} is not tenant=weight with a weight above 0")
        if tenant in weights:
            raise _bad_weight(f"the tenant {tenant!r} is given twice")
        weights[tenant] = weight
    return weights


def _bad_weight(message: str) -> ServiceError:
    text = f"--tenant-weights: {message}"
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="tenant_weights")
