"""Changes that clients make to open requests: credit, more of a prompt, limits, priority, deadline.

Checked before anything is changed. Independent of steps and events.
"""

import math
from collections.abc import Sequence as Ids

from sluice_server.engine.checks import check_credit, check_ids, check_priority
from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.engine.request import Limits
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.policies import Policy
from sluice_server.engine.scheduler.sequence import SequenceStatus
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.validation import RequestValidator


class RequestChanges:
    """Changes open groups, and has those go on that wait for the change."""

    def __init__(
        self, state: SchedulerState, planner: Planner, validator: RequestValidator, policy: Policy, limits: Limits
    ) -> None:
        self._state = state
        self._planner = planner
        self._validator = validator
        self._policy = policy
        self._limits = limits

    def grant(self, group: SequenceGroup, num_tokens: int, now: float) -> None:
        """Adds `num_tokens` of credit. Raises ServiceError: sent without credit, or out of range."""
        if group.credit is None:
            raise invalid("grant", "the request was sent without credit_window: its credit is unlimited")
        check_credit(num_tokens, self._limits)
        check_credit(group.credit + num_tokens, self._limits)
        group.credit += num_tokens
        self._wake(group, now)

    def append(self, group: SequenceGroup, ids: Ids[int], now: float) -> None:
        """Appends ids to the prompt. Raises ServiceError, and changes nothing, when closed or too long."""
        if not group.is_open:
            raise ServiceError(Code.FAILED_PRECONDITION, "INPUT_CLOSED", "the input of this request is closed")
        check_ids("append", ids, self._limits)
        num_prompt = len(group.prompt) + len(ids)
        max_tokens = group.asked_tokens or self._limits.context_length - num_prompt
        self._validator.check_size(group, num_prompt, max_tokens)
        with self._state.requeued(group):
            group.max_tokens = max_tokens
            group.prompt.extend(ids)
            for sequence in group.sequences:
                sequence.tokens.extend(ids)
        self._wake(group, now)

    def close_input(self, group: SequenceGroup, now: float) -> None:
        """Closes the input, so that sampling may start. Idempotent."""
        group.is_open = False
        self._wake(group, now)

    def update(
        self, group: SequenceGroup, max_tokens: int | None, priority: int | None, deadline_s: float | None
    ) -> None:
        """Changes limits and order; None leaves a value unchanged. Raises ServiceError: out of range."""
        if priority is not None:
            check_priority(priority, self._limits)
        if deadline_s is not None and math.isnan(deadline_s):
            raise invalid("deadline", "is not a number")
        if max_tokens is not None:
            if max_tokens < 1:
                raise invalid("max_tokens", f"{max_tokens} is below 1", limit=1)
            self._validator.check_size(group, len(group.prompt), max_tokens)
        with self._state.requeued(group):
            if max_tokens is not None:
                group.asked_tokens = group.max_tokens = max_tokens
            group.priority = group.priority if priority is None else priority
            group.deadline_s = group.deadline_s if deadline_s is None else deadline_s
            group.measure = self._policy.measure(group)

    def _wake(self, group: SequenceGroup, now: float) -> None:
        """Resumes a group after an action of its client, as far as that action allows."""
        self._state.wake(group)
        if group.can_fork and group.sequences[0].state is SequenceStatus.RUNNING:
            self._state.fork_all(group)
        if group.is_held:
            self._planner.hold(group, now)
