"""Bugs planted in draft scheduling and in steps planned ahead: the simulator notices each of them soon."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sluice_server.engine.plan import StepPlan, VerifiedDrafts, num_accepted
from sluice_server.engine.scheduler import drafts as drafts_module
from sluice_server.engine.scheduler import plan_writing
from sluice_server.engine.scheduler.async_planner import AsyncPlanner
from sluice_server.engine.scheduler.decode_rows import DecodeRows
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.in_flight import InFlightSteps
from sluice_server.engine.scheduler.outputs import Outputs
from sluice_server.engine.scheduler.plan_writing import PlannedRows
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.sequence import Sequence as Row
from sluice_server.engine.scheduler.sequence import SequenceStatus
from sluice_server.engine.scheduler.state import SchedulerState
from tests.engine.scheduler.seeded_bugs import Bug, assert_noticed, cases


def accept_one_too_many(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    return min(len(drafts), num_accepted(drafts, sampled) + 1)


def accept_whatever_is_right(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    return sum(draft == token for draft, token in zip(drafts, sampled, strict=False))


def forget_to_roll_back(
    self: DraftScheduler, sequence: Row, num: int, run: VerifiedDrafts, now: float, events: list[Sampled]
) -> None:
    verify(self, sequence, num, run, now, events)
    if sequence.state is SequenceStatus.RUNNING:
        sequence.num_computed = min(sequence.num_computed + 1, len(sequence.tokens) - 1 + num)


def name_a_block_that_ends_in_a_wrong_draft(self: SchedulerState, sequence: Row, num_tokens: int) -> None:
    if num_tokens == sequence.num_computed < len(sequence.table.blocks) * self.cache.block_size:
        self.cache.commit(sequence.table, sequence.tokens, num_tokens + 1)
    shrink(self, sequence, num_tokens)


def keep_the_blocks_of_wrong_drafts(self: SchedulerState, sequence: Row, num_tokens: int) -> None:
    return None


def tell_no_parents(step: int, planned: PlannedRows, state: SchedulerState) -> StepPlan:
    return dataclasses.replace(write(step, planned, state), parents={})


def tell_parents_of_before(step: int, planned: PlannedRows, state: SchedulerState) -> StepPlan:
    plan = write(step, planned, state)
    return dataclasses.replace(plan, parents={i: (-1, *ones[:-1]) for i, ones in plan.parents.items()})


def cut_a_tree_and_not_its_parents(self: DraftScheduler, remaining: int, step: int) -> dict[Row, int]:
    parents = {one: list(one.drafting.parents) for one in self.offered if one.drafting is not None}
    nums = take(self, remaining, step)
    for one in nums:
        if one.drafting is not None and one.drafting.parents:
            one.drafting.parents = parents[one]
    return nums


def draft_on_credit(self: DraftScheduler, remaining: int, step: int) -> dict[Row, int]:
    nums = take(self, remaining, step)
    for one, num in nums.items():
        if one.group.credit is not None:
            one.group.credit += num
    return nums


def keep_the_credit_of_undelivered_tokens(self: SchedulerState, group: SequenceGroup, num_tokens: int) -> None:
    return None


def forget_what_is_in_flight(self: InFlightSteps) -> dict[Row, tuple[int, int]]:
    return {}


def take_it_for_the_one_before(self: InFlightSteps, plan: StepPlan, rows: list[Row], now: float) -> None:
    begin(self, plan, rows, now)
    for one in rows:
        one.num_places -= one.num_places > 1


def write_ahead_without_room(self: AsyncPlanner, rows: DecodeRows) -> bool:
    return True


def give_room_to_the_first_alone(self: DecodeRows) -> list[int]:
    return full(self)[:1]


def see_no_change(self: DecodeRows, num_changes: int, *, rests: bool) -> bool:
    return may_follow(self, self._num_changes, rests=rests)


def stay_where_one_was(self: DecodeRows) -> None:
    starts = self.starts
    follow(self)
    self.starts = starts


def guess_what_the_host_must_know(self: SequenceGroup) -> None:
    self.needs_host = False


def spend_no_credit_ahead(self: Planner, rows: DecodeRows, now: float) -> StepPlan:
    credits = {one.group: one.group.credit for one in rows.sequences}
    plan = decode_ahead(self, rows, now)
    for group, credit in credits.items():
        group.credit = credit
    return plan


def run_past_the_end(self: Outputs, sequence: Row, tokens: Sequence[int]) -> int:
    return len(tokens)


def draft_beyond_the_limit(sequence: Row) -> int:
    assert sequence.drafting is not None
    return sequence.drafting.limit


def forget_what_was_grown_ahead(self: DraftScheduler, sequence: Row, num: int, spare: int) -> tuple[int, int]:
    grown = grow_ahead(self, sequence, num, spare)
    self._grown.clear()
    return grown


def draft_without_room(self: DraftScheduler, sequence: Row, num: int) -> int:
    return num


def draft_beyond_the_budget(self: DraftScheduler, remaining: int, step: int) -> dict[Row, int]:
    return take(self, remaining + 1, step)


write = plan_writing.write
shrink = SchedulerState.shrink
begin = InFlightSteps.begin
decode_ahead = Planner.decode_ahead
full = DecodeRows.full
may_follow = DecodeRows.may_follow
follow = DecodeRows.follow
verify = DraftScheduler.verify
take = DraftScheduler.take
grow_ahead = DraftScheduler._grow_ahead

BUGS: list[Bug] = [
    (drafts_module, "num_accepted", accept_one_too_many),
    (drafts_module, "num_accepted", accept_whatever_is_right),
    (DraftScheduler, "verify", forget_to_roll_back),
    (SchedulerState, "shrink", name_a_block_that_ends_in_a_wrong_draft),
    (SchedulerState, "shrink", keep_the_blocks_of_wrong_drafts),
    (plan_writing, "write", tell_no_parents),
    (plan_writing, "write", tell_parents_of_before),
    (DraftScheduler, "take", cut_a_tree_and_not_its_parents),
    (DraftScheduler, "take", draft_on_credit),
    (SchedulerState, "give_back", keep_the_credit_of_undelivered_tokens),
    (InFlightSteps, "under_way", forget_what_is_in_flight),
    (InFlightSteps, "begin", take_it_for_the_one_before),
    (AsyncPlanner, "_make_room", write_ahead_without_room),
    (DecodeRows, "full", give_room_to_the_first_alone),
    (DecodeRows, "may_follow", see_no_change),
    (DecodeRows, "follow", stay_where_one_was),
    (SequenceGroup, "__post_init__", guess_what_the_host_must_know),
    (Planner, "decode_ahead", spend_no_credit_ahead),
    (Outputs, "num_kept", run_past_the_end),
    (drafts_module, "_limit", draft_beyond_the_limit),
    (DraftScheduler, "_grow_ahead", forget_what_was_grown_ahead),
    (DraftScheduler, "_grow", draft_without_room),
    (DraftScheduler, "take", draft_beyond_the_budget),
]
LATE = (
    run_past_the_end,
    keep_the_credit_of_undelivered_tokens,
    see_no_change,
    draft_beyond_the_limit,
    draft_on_credit,
)


@pytest.mark.parametrize(("owner", "name", "bug"), cases(BUGS, LATE))
def test_the_simulator_notices(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert_noticed()
