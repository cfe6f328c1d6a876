"""The tokens of each slot that the device does not have: those of its next step are staged before it begins.

A device writes what it samples itself, so that the next step can be launched before the host reads it. All other tokens
(prompts, drafts, what the host samples, what follows a failure) come from here. Takes rows of plans, not requests.
"""

import numpy as np

from sluice_server.engine.plan import IN_FLIGHT, Placement, StepPlan
from sluice_server.engine.worker.followers import Followers
from sluice_server.engine.worker.slots.state import DeviceState
from sluice_server.engine.worker.step_numbers import UniformRows
from sluice_server.kernels.layout.ragged import Longs

UNKNOWN = -1  # the device has written no token of the slot itself


class StagedTokens:
    """Knows by slot whether the device samples for it, and the newest token that the device has written itself."""

    def __init__(self, state: DeviceState, followers: Followers) -> None:
        num_slots = len(state.tokens)
        self._state = state
        self._followers = followers
        self._is_plain = np.zeros(num_slots, dtype=np.bool_)  # whether the slot needs nothing but sampling
        self._ahead = np.full(num_slots, UNKNOWN, dtype=np.int64)  # position of that token

    def place(self, placement: Placement) -> None:
        """Resets a slot."""
        self._is_plain[placement.slot] = wants_only_sampling(placement)
        self._ahead[placement.slot] = UNKNOWN

    def are_plain(self, slots: Longs) -> bool:
        """Returns whether all of these slots need nothing but sampling."""
        return bool(self._is_plain[slots].all())

    def stage(self, plan: StepPlan, rows: UniformRows, *, is_sampled: bool) -> None:
        """Begins to write the tokens of a step that the device does not have, and what else has changed.

        `rows`: those of the plan, in its order. `is_sampled`: the device samples behind the step, and writes the token
        behind the last one of each row that samples; not behind drafts, of which the host does not know yet which are
        right.
        """
        slots, starts, lens = rows.slots, rows.starts, rows.lens
        unknown = np.flatnonzero((self._ahead[slots] != starts) | (lens > 1))
        if len(unknown):
            self._note(plan, unknown, np.cumsum(lens) - lens)
        if not is_sampled:
            self._ahead[slots] = UNKNOWN
        elif rows.samples is not None:
            self._ahead[slots] = np.where(rows.samples, starts + lens, UNKNOWN)
        else:
            self._ahead[slots] = np.where(lens == 1, starts + 1, UNKNOWN)
        self._state.flush()

    def _note(self, plan: StepPlan, at: Longs, firsts: Longs) -> None:
        """Stages the tokens of rows `at`; `firsts`: the index of each row's first token in the step."""
        for i, first in zip(at.tolist(), firsts[at].tolist(), strict=True):
            slot, start, ids = plan.slots[i], plan.starts[i], plan.token_ids[first : first + plan.query_lens[i]]
            assert IN_FLIGHT not in ids, f"slot {slot}: the token at {start} is on no device"
            self._state.note(slot, start, ids)
            self._followers.note(slot, start, ids)


def wants_only_sampling(placement: Placement) -> bool:
    """Returns whether the request uses the logits unchanged and reports nothing about them."""
    params = placement.params
    is_restricted = params.has_banned_tokens or params.needs_tokens or params.allowed_token_ids or params.min_tokens
    has_reports = params.logprobs >= 0 or params.is_search
    return not (is_restricted or has_reports or params.logit_bias)
