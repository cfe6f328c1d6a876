"""Who goes first: a table of policies by name. A policy gives an open request a number; the smaller one goes first.

Equal numbers go by arrival. The numbers of a static policy stay as they are, so a preempted request keeps its place;
a fair share moves with what the tenant was given. Knows no blocks and no steps.
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
    """One way to order requests.

    Attributes:
        is_static: a request's number changes only when the request itself is changed.
        preempts: a waiting request may displace a running one of lower priority.
    """

    is_static: bool
    preempts: bool

    def measure(self, group: SequenceGroup) -> float:
        """The request's number."""

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """Why the request should not even be queued; None if it may."""

    def enter(self, group: SequenceGroup) -> None:
        """The request was queued."""

    def start(self, group: SequenceGroup) -> None:
        """The request was given slots for the first time."""

    def leave(self, group: SequenceGroup) -> None:
        """The request has ended."""


class StaticPolicy:
    """Orders by a function of the request alone, and refuses nobody."""

    is_static = True

    def __init__(self, measure: Callable[[SequenceGroup], float], preempts: bool = False) -> None:
        self.preempts = preempts
        self._measure = measure

    def measure(self, group: SequenceGroup) -> float:
        """What the function says."""
        return self._measure(group)

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """None, ever."""
        return None

    def enter(self, group: SequenceGroup) -> None:
        """Nothing to note."""

    def start(self, group: SequenceGroup) -> None:
        """Nothing to note."""

    def leave(self, group: SequenceGroup) -> None:
        """Nothing to note."""


class EarliestDeadline(StaticPolicy):
    """By the time at which the answer, or its first token, is wanted; refuses what cannot be in time."""

    def __init__(self, lengths: OutputLengths) -> None:
        super().__init__(lambda group: min(group.deadline_s, group.request.arrival_s + group.request.ttft_target_s))
        self._lengths = lengths

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """An estimate in the request's favour: as if nobody were ahead of it and its prompt had the whole budget."""
        if math.isinf(group.deadline_s):
            return None
        steps = self._lengths.expected(group.request.tenant, group.max_tokens)
        seconds = pace.time_for(len(group.prompt), steps)
        left = group.deadline_s - now
        return deadline_unattainable(seconds, left) if seconds > left else None


class FairShare:
    """By what the tenant was given so far, over its weight: the virtual token counter (Sheng et al., OSDI 2024).

    A request is charged what it is predicted to take when it starts, and what it took when it ends: charging only as
    tokens come would let a tenant take every slot before its counter moves. A tenant that comes back after a pause
    starts at the least counter of those that are here, so idleness is not saved up.
    """

    is_static = False
    preempts = False

    def __init__(self, weights: Mapping[str, float], lengths: OutputLengths) -> None:
        self._weights = weights
        self._lengths = lengths
        self._given: dict[str, float] = {}  # of tenants with open requests
        self._num_open: dict[str, int] = {}
        self._charged: dict[str, float] = {}  # by request id

    def measure(self, group: SequenceGroup) -> float:
        """The tenant's counter."""
        return self._given[group.request.tenant]

    def refusal(self, group: SequenceGroup, now: float, pace: StepRates) -> ServiceError | None:
        """None, ever."""
        return None

    def enter(self, group: SequenceGroup) -> None:
        """A tenant that was away starts level with the others."""
        tenant = group.request.tenant
        if tenant not in self._given:
            self._given[tenant] = min(self._given.values(), default=0.0)
        self._num_open[tenant] = self._num_open.get(tenant, 0) + 1

    def start(self, group: SequenceGroup) -> None:
        """Charge the prompt, and the output as predicted."""
        tenant, params = group.request.tenant, group.request.params
        output = self._lengths.expected(tenant, group.max_tokens) * params.num_sequences
        self._charge(group, len(group.prompt) + output)

    def leave(self, group: SequenceGroup) -> None:
        """Correct the charge to what was computed; forget a tenant without open requests."""
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
    """Priority with ageing: a level is worth `ageing_s` of waiting, so nobody starves, and the order of two requests
    never changes. A target for the first token orders requests within a level."""

    def measure(group: SequenceGroup) -> float:
        target = min(group.request.ttft_target_s, settings.ageing_s)
        return group.request.arrival_s + target - group.priority * settings.ageing_s

    return StaticPolicy(measure, preempts=True)


def _shortest(settings: SchedulerSettings, lengths: OutputLengths, context_length: int) -> Policy:
    """Shortest predicted output first; what arrives `starvation_s` later overtakes nobody."""

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
    """The policy that the settings name. Raises ServiceError with the known names."""
    if settings.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        text = f"--scheduling-policy: {settings.policy!r} is not one of {known}"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="scheduling_policy")
    return POLICIES[settings.policy](settings, lengths, context_length)
