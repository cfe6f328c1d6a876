"""Scheduling policies by name. A policy gives each open request a number; requests are served in ascending order.

Equal numbers go by arrival. The number of a static policy is constant, so a preempted request keeps its place; that of
fair share changes with the tenant's service. Independent of blocks and steps.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from sluice_server.engine.errors import Code, ServiceError, deadline_unattainable
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.step_rates import StepRates


class Policy(Protocol):
    """An order of requests.

    Attributes:
        is_static: a request's number changes only when the request itself is changed.
        preempts: a waiting request may preempt a running one of lower priority.
    """

    is_static: bool
    preempts: bool

    def measure(self, group: SequenceGroup) -> float:
        """Returns the request's number; the smaller one goes first."""

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """Returns the error with which the request is refused before it is queued; None if it may be queued."""

    def enter(self, group: SequenceGroup) -> None:
        """Called when the request is queued."""

    def start(self, group: SequenceGroup) -> None:
        """Called when the request gets slots for the first time."""

    def leave(self, group: SequenceGroup) -> None:
        """Called when the request has ended."""


class StaticPolicy:
    """Orders by a function of the request alone; refuses none."""

    is_static = True

    def __init__(self, measure: Callable[[SequenceGroup], float], preempts: bool = False) -> None:
        self.preempts = preempts
        self._measure = measure

    def measure(self, group: SequenceGroup) -> float:
        """Returns the value of the function."""
        return self._measure(group)

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """Returns None: every request may be queued."""
        return None

    def enter(self, group: SequenceGroup) -> None:
        """Does nothing."""

    def start(self, group: SequenceGroup) -> None:
        """Does nothing."""

    def leave(self, group: SequenceGroup) -> None:
        """Does nothing."""


class EarliestDeadline(StaticPolicy):
    """Orders by the deadline of the answer or of its first token; refuses requests that cannot meet it."""

    def __init__(self, lengths: OutputLengths) -> None:
        super().__init__(lambda group: min(group.deadline_s, group.request.arrival_s + group.request.ttft_target_s))
        self._lengths = lengths

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """Refuses by an optimistic estimate: no other request goes first, and the prompt gets the whole budget."""
        if math.isinf(group.deadline_s):
            return None
        steps = self._lengths.expected(group.request.tenant, group.max_tokens)
        seconds = pace.time_for(len(group.prompt), steps)
        left = group.deadline_s - now
        return deadline_unattainable(seconds, left) if seconds > left else None


class FairShare:
    """Orders by the tenant's service so far over its weight: the virtual token counter (Sheng et al., OSDI 2024).

    A request is charged its predicted tokens when it starts, corrected to the actual ones when it ends. Charging only
    as tokens are sampled would let a tenant take every slot before its counter moves. A tenant that returns after a
    pause starts at the lowest counter of the active tenants, so idle time gives no advantage.
    """

    is_static = False
    preempts = False

    def __init__(self, weights: Mapping[str, float], lengths: OutputLengths) -> None:
        self._weights = weights
        self._lengths = lengths
        self._given: dict[str, float] = {}  # counters of tenants with open requests
        self._num_open: dict[str, int] = {}
        self._charged: dict[str, float] = {}  # tokens charged, by request id

    def measure(self, group: SequenceGroup) -> float:
        """Returns the tenant's counter."""
        return self._given[group.request.tenant]

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """Returns None: every request may be queued."""
        return None

    def enter(self, group: SequenceGroup) -> None:
        """Starts a tenant without open requests at the lowest counter of the others."""
        tenant = group.request.tenant
        if tenant not in self._given:
            self._given[tenant] = min(self._given.values(), default=0.0)
        self._num_open[tenant] = self._num_open.get(tenant, 0) + 1

    def start(self, group: SequenceGroup) -> None:
        """Charges the prompt and the predicted output."""
        tenant, params = group.request.tenant, group.request.params
        output = self._lengths.expected(tenant, group.max_tokens) * params.num_sequences
        self._charge(group, len(group.prompt) + output)

    def leave(self, group: SequenceGroup) -> None:
        """Corrects the charge to what was computed, and removes a tenant without open requests."""
        tenant = group.request.tenant
        if group.request_id in self._charged:
            self._charge(group, len(group.prompt) + group.num_sampled)
            del self._charged[group.request_id]
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant], self._given[tenant]

    def _charge(self, group: SequenceGroup, tokens: float) -> None:
        tenant, request_id = group.request.tenant, group.request_id
        change = tokens - self._charged.get(request_id, 0.0)
        self._charged[request_id] = tokens
        self._given[tenant] += change / self._weights.get(tenant, 1.0)


def _priority(settings: SchedulerSettings, lengths: OutputLengths, context_length: int) -> Policy:
    """Priority with ageing: one level is worth `ageing_s` of waiting, so no request starves.

    The order of two requests never changes. A target for the first token orders requests within a level.
    """

    def measure(group: SequenceGroup) -> float:
        target = min(group.request.ttft_target_s, settings.ageing_s)
        return group.request.arrival_s + target - group.priority * settings.ageing_s

    return StaticPolicy(measure, preempts=True)


def _shortest(settings: SchedulerSettings, lengths: OutputLengths, context_length: int) -> Policy:
    """Shortest predicted output first; a request that arrives `starvation_s` later overtakes none."""

    def measure(group: SequenceGroup) -> float:
        tokens = lengths.expected(group.request.tenant, group.max_tokens)
        return group.request.arrival_s + settings.starvation_s * min(1.0, tokens / context_length)

    return StaticPolicy(measure)


POLICIES: Mapping[str, Callable[[SchedulerSettings, OutputLengths, int], Policy]] = {
    "priority": _priority,
    "fcfs": lambda settings, lengths, context_length: StaticPolicy(lambda group: 0.0),
    "sjf": _shortest,
    "fair": lambda settings, lengths, context_length: FairShare(settings.tenant_weights, lengths),
    "deadline": lambda settings, lengths, context_length: EarliestDeadline(lengths),
}


def make_policy(settings: SchedulerSettings, lengths: OutputLengths, context_length: int) -> Policy:
    """Returns the policy that the settings name. Raises ServiceError with the known names."""
    if settings.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        text = f"--scheduling-policy: {settings.policy!r} is not one of {known}"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="scheduling_policy")
    return POLICIES[settings.policy](settings, lengths, context_length)
