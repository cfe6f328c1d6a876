"""Bugs planted in admission, planning, outputs and eviction: the simulator notices each of them soon."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.request import FinishReason
from sluice_server.engine.scheduler import plan_writing, victims
from sluice_server.engine.scheduler.admission import AdmissionControl
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.outputs import Outputs
from sluice_server.engine.scheduler.plan_writing import PlannedRows
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import Sequence as Row
from sluice_server.engine.scheduler.sequence import SequenceStatus
from sluice_server.engine.scheduler.shortage import BlockShortage
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.waiting import WaitingQueue
from tests.engine.scheduler.seeded_bugs import Bug, assert_noticed, cases


def same_noise_for_all(self: SchedulerState, sequence: Row) -> None:
    tell(self, sequence)
    self.placements[-1] = dataclasses.replace(self.placements[-1], output_index=0)


def fork_a_token_late(self: SchedulerState, parent: Row, child: Row) -> None:
    fork_row(self, parent, child)
    child.num_computed += 1


def lose_a_spare_slot(self: SchedulerState, group: SequenceGroup) -> None:
    group.spare_slots.clear()


def best_is_worst(self: Outputs, group: SequenceGroup, now: float) -> list[Sampled]:
    group.completed.reverse()
    group.completed.sort(key=lambda one: one.score)
    del group.completed[group.params.n :]
    return answer(self, group, now)


def lose_deadlines(self: Scheduler, now: float) -> tuple[list[Any], list[Any]]:
    return expire(self, -1.0)[0], []


def lose_a_cancel(self: Scheduler, request_id: str) -> bool:
    return request_id in self._state.groups


def lose_a_grant(self: Scheduler, request_id: str, num_tokens: int, now: float) -> None:
    return None


def close_without_waking(self: Scheduler, request_id: str, now: float) -> None:
    self._group(request_id).is_open = False


def append_to_the_prompt_only(self: Scheduler, request_id: str, ids: Sequence[int], now: float) -> None:
    self._group(request_id).prompt.extend(ids)


def keep_the_slot(self: SchedulerState, sequence: Row, *, reuse: bool = False, is_worthless: bool = False) -> None:
    slot = sequence.slot
    leave(self, sequence, reuse=reuse, is_worthless=is_worthless)
    sequence.slot = slot


def leave_the_row_stale(self: SchedulerState, sequence: Row) -> None:
    sequence.num_blocks_planned = 0


def evict_without_queueing(self: SchedulerState, sequence: Row) -> None:
    self._leave(sequence)
    sequence.state = SequenceStatus.PAUSED


def queue_at_the_front(self: WaitingQueue, sequence: Row) -> None:
    self.num_tokens += len(sequence.group.prompt)
    self._sequences.insert(0, sequence)


def forget_the_tokens_of_the_queue(self: WaitingQueue, sequence: Row) -> None:
    self._sequences.remove(sequence)


def tell_no_blocks(step: int, planned: PlannedRows, state: SchedulerState) -> StepPlan:
    plan = write(step, planned, state)
    plan.new_blocks.clear()
    return plan


def sample_too_early(self: SequenceGroup, sequence: Row) -> int:
    return len(sequence.tokens)


def never_hold(self: SequenceGroup) -> None:
    self.is_held = self.holds_back = False


def spend_no_credit(self: Planner, sequence: Row, num: int) -> None:
    group, credit = sequence.group, sequence.group.credit
    enrol(self, sequence, num)
    group.credit = credit


def miss_the_limit(self: Outputs, sequence: Row, token: int) -> FinishReason | None:
    finish = finish_of(self, sequence, token)
    return None if finish is FinishReason.LENGTH and sequence.num_output < 39 else finish


def swallow_a_failure(self: Outputs, group: SequenceGroup, error: ServiceError) -> tuple[str, ServiceError]:
    return group.request_id, error


def stop_admission_after_a_preemption(
    self: AdmissionControl, now: float, step: int, budget: int, most_pooled: int, prefills: list[Row]
) -> None:
    if self._state.num_preemptions == 0:
        admit(self, now, step, budget, most_pooled, prefills)


def no_last_resort(self: Planner) -> None:
    return None


def take_from_this_step(sequence: Row, step: int) -> bool:
    return True


def ignore_the_limit(
    running: Iterable[Row], beneficiary: Row, step: int, max_preemptions: int, loss: Callable[[Row], victims.Loss]
) -> Row | None:
    return behind(running, beneficiary, step, 1000, loss)


def wait_for_anyone(self: BlockShortage, sequence: Row, num_tokens: int, victim: Row) -> bool:
    return True


expire = Scheduler.expire
leave = SchedulerState._leave
write = plan_writing.write
enrol = Planner._enrol
admit = AdmissionControl.admit
behind = victims.behind
finish_of = Outputs._finish_of
answer = Outputs._answer
fork_row = SchedulerState.fork
tell = SchedulerState._report

BUGS: list[Bug] = [
    (SchedulerState, "_report", same_noise_for_all),
    (SchedulerState, "fork", fork_a_token_late),
    (SchedulerState, "_give_spares", lose_a_spare_slot),
    (Outputs, "_answer", best_is_worst),
    (Scheduler, "expire", lose_deadlines),
    (Scheduler, "cancel", lose_a_cancel),
    (Scheduler, "grant", lose_a_grant),
    (Scheduler, "close_input", close_without_waking),
    (Scheduler, "append", append_to_the_prompt_only),
    (SchedulerState, "_leave", keep_the_slot),
    (SchedulerState, "_report", leave_the_row_stale),
    (SchedulerState, "evict", evict_without_queueing),
    (WaitingQueue, "add", queue_at_the_front),
    (WaitingQueue, "remove", forget_the_tokens_of_the_queue),
    (plan_writing, "write", tell_no_blocks),
    (SequenceGroup, "num_ready", sample_too_early),
    (SequenceGroup, "refresh_hold", never_hold),
    (Planner, "_enrol", spend_no_credit),
    (Outputs, "_finish_of", miss_the_limit),
    (Outputs, "fail", swallow_a_failure),
    (AdmissionControl, "admit", stop_admission_after_a_preemption),
    (Planner, "_last_resort", no_last_resort),
    (victims, "is_free", take_from_this_step),
    (victims, "behind", ignore_the_limit),
    (BlockShortage, "_waits", wait_for_anyone),
]
LATE = (
    wait_for_anyone,
    take_from_this_step,
)


@pytest.mark.parametrize(("owner", "name", "bug"), cases(BUGS, LATE))
def test_the_simulator_notices(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert_noticed()
