"""Mutation check: bugs planted one by one in the engine's classes, each of which the simulator must notice soon."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache import cache as cache_module
from sluice_server.engine.kv_cache import prefix
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.pool import BlockPool
from sluice_server.engine.kv_cache.prefix import PrefixIndex
from sluice_server.engine.kv_cache.sizes import CacheSizes
from sluice_server.engine.kv_cache.table import BlockTable, CachedPrefix
from sluice_server.engine.kv_cache.tiers import Move, MoveKind, Tiers
from sluice_server.engine.plan import StepPlan, VerifiedDrafts, num_accepted
from sluice_server.engine.request import FinishReason
from sluice_server.engine.scheduler import drafts as drafts_module
from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.admission import AdmissionControl
from sluice_server.engine.scheduler.async_planner import AsyncPlanner
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.in_flight import InFlightSteps
from sluice_server.engine.scheduler.outputs import Outputs
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import Sequence as Row
from sluice_server.engine.scheduler.sequence import SequenceStatus
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.waiting import WaitingQueue
from tests.engine.scheduler.simulate import Simulation

EVENTS = 3000  # of each seed, within which a bug must show
SEEDS = range(24)

Bug = tuple[object, str, Callable[..., Any]]


def skip_release(self: KVCache, table: BlockTable, *_: object, **__: object) -> None:
    for own in table.groups:
        own.clear()
    table.num_named = 0


def release_twice(self: KVCache, table: BlockTable, *_: object, **__: object) -> None:
    for own in table.groups:
        for block in own * 2:
            self.pool.release(block)
        own.clear()


def share_without_counting(self: BlockPool, block: int) -> None:
    if self._refs[block] == 0:
        self._unlink(block)
        self._refs[block] = 1


def share_without_unlinking(self: BlockPool, block: int) -> None:
    self._refs[block] += 1


def grow_one_short(self: KVCache, table: BlockTable, num_tokens: int) -> bool:
    return grow(self, table, num_tokens - 1)


def name_too_early(self: KVCache, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
    commit(self, table, tokens, min(num_computed + self.block_size, len(tokens)))


def forget_nothing(self: PrefixIndex, block: int) -> bool:
    return False


def name_without_parent(parent: bytes, tokens: Sequence[int]) -> bytes:
    return name_block(b"", tokens)


def name_without_framing(parent: bytes, tokens: Sequence[int]) -> bytes:
    return name_block(parent, [sum(tokens)])


def fork_without_counting(self: KVCache, table: BlockTable, num_tokens: int) -> BlockTable:
    child = fork(self, table, num_tokens)
    for block in child.blocks:
        self.pool.release(block)
    return child


def write_to_a_shared_tail(self: KVCache, table: BlockTable, num_tokens: int) -> BlockTable:
    child = fork(self, table, num_tokens)
    child.shared_tail = table.shared_tail = -1
    return child


def lose_a_move(self: KVCache) -> list[Move]:
    return take_moves(self)[1:]


def copy_the_other_way(self: KVCache) -> list[Move]:
    turned = [(move.target, move.source) if move.kind is MoveKind.COPY else (-1, -1) for move in take_moves(self)]
    return [Move(MoveKind.COPY, *ends) for ends in turned if ends != (-1, -1)]


def move_in_another_order(self: KVCache) -> list[Move]:
    return take_moves(self)[::-1]


def use_a_bad_read(self: Tiers, move: Move, is_good: bool) -> None:
    tier_ended(self, move, is_good=True)


def reuse_a_slot_that_is_read_into(self: Tiers, name: bytes) -> list[Move] | None:
    moves = read(self, name)
    if moves is not None:
        self._free.append(moves[-1].target)
    return moves


def save_under_the_slot_of_another(self: Tiers, name: bytes, block: int) -> list[Move]:
    moves = save(self, name, block)
    if moves and len(self._host) > 1:
        other = next(iter(self._host))
        self._host[name], self._host[other] = self._host[other], self._host[name]
    return moves


def forget_the_disk_budget(self: Tiers, name: bytes, slot: int) -> list[Move]:
    self._disk[name] = None
    return [Move(MoveKind.WRITE, slot, name=name)]


def trim_a_block_too_many(self: CacheSizes, group: int, num_computed: int) -> int:
    return passed(self, group, num_computed + self.block_size) if num_computed else 0


def trim_without_telling(self: KVCache, table: BlockTable, num_computed: int) -> list[tuple[int, int, int]]:
    self.pool.release(table.blocks[0])
    return []


def match_without_windows(
    self: KVCache, table: BlockTable, tokens: Sequence[int], found: list[list[int]], num_full: int
) -> CachedPrefix:
    num = len(found[0])
    return CachedPrefix(num, [*found[:num_full], *([self.pool.null] * num for _ in found[num_full:])])


def name_groups_alike(name: bytes, group: int) -> bytes:
    return name


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
    sequence.num_blocks_told = 0


def evict_without_queueing(self: SchedulerState, sequence: Row) -> None:
    self._leave(sequence)
    sequence.state = SequenceStatus.PAUSED


def queue_at_the_front(self: WaitingQueue, sequence: Row) -> None:
    self.num_tokens += len(sequence.group.prompt)
    self._sequences.insert(0, sequence)


def forget_the_tokens_of_the_queue(self: WaitingQueue, sequence: Row) -> None:
    self._sequences.remove(sequence)


def tell_no_blocks(self: Planner) -> StepPlan:
    plan = write(self)
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


def admit_nobody_after_a_preemption(
    self: AdmissionControl, now: float, step: int, budget: int, prefills: list[Row]
) -> None:
    if self._state.num_preemptions == 0:
        admit(self, now, step, budget, prefills)


def no_last_resort(self: Planner) -> None:
    return None


def spare_nobody(running: Iterable[Row], beneficiary: Row, step: int, max_preemptions: int) -> Row | None:
    return behind(running, beneficiary, step, 1000)


def take_from_this_step(sequence: Row, step: int) -> bool:
    return True


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


def tell_no_parents(self: Planner) -> StepPlan:
    return dataclasses.replace(write(self), parents={})


def tell_parents_of_before(self: Planner) -> StepPlan:
    plan = write(self)
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


def keep_the_credit_of_what_nobody_got(self: SchedulerState, group: SequenceGroup, num_tokens: int) -> None:
    return None


def forget_what_is_in_flight(self: InFlightSteps) -> dict[Row, tuple[int, int]]:
    return {}


def write_ahead_without_room(self: AsyncPlanner, rows: list[tuple[Row, int]]) -> bool:
    return True


def guess_what_the_host_must_know(self: SequenceGroup) -> None:
    self.needs_host = False


def spend_no_credit_ahead(self: Planner, rows: list[tuple[Row, int]], now: float) -> StepPlan:
    credits = {one.group: one.group.credit for one, _ in rows}
    plan = decode_ahead(self, rows, now)
    for group, credit in credits.items():
        group.credit = credit
    return plan


def take_it_for_the_one_before(self: InFlightSteps, plan: StepPlan, rows: list[Row], now: float) -> None:
    begin(self, plan, rows, now)
    for one in rows:
        one.num_places -= one.num_places > 1


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


grow, commit, name_block = KVCache.grow, KVCache.commit, prefix.name_block
expire, leave, write, enrol, admit = (
    Scheduler.expire,
    SchedulerState._leave,
    Planner._write,
    Planner._enrol,
    AdmissionControl.admit,
)
behind = victims.behind
finish_of, answer = Outputs._finish_of, Outputs._answer
fork, take_moves, fork_row, tell = KVCache.fork, KVCache.take_moves, SchedulerState.fork, SchedulerState._tell
shrink = SchedulerState.shrink
begin = InFlightSteps.begin
decode_ahead = Planner.decode_ahead
verify, take, grow_ahead = DraftScheduler.verify, DraftScheduler.take, DraftScheduler._grow_ahead
tier_ended, read, save, passed = Tiers.ended, Tiers.read, Tiers.save, CacheSizes.num_passed
BUGS: list[Bug] = [
    (KVCache, "release", skip_release),
    (KVCache, "release", release_twice),
    (BlockPool, "share", share_without_counting),
    (BlockPool, "share", share_without_unlinking),
    (KVCache, "grow", grow_one_short),
    (KVCache, "commit", name_too_early),
    (PrefixIndex, "forget", forget_nothing),
    (cache_module, "name_block", name_without_parent),
    (cache_module, "name_block", name_without_framing),
    (KVCache, "fork", fork_without_counting),
    (KVCache, "fork", write_to_a_shared_tail),
    (KVCache, "take_moves", lose_a_move),
    (KVCache, "take_moves", copy_the_other_way),
    (KVCache, "take_moves", move_in_another_order),
    (Tiers, "ended", use_a_bad_read),
    (Tiers, "read", reuse_a_slot_that_is_read_into),
    (Tiers, "save", save_under_the_slot_of_another),
    (Tiers, "_to_disk", forget_the_disk_budget),
    (CacheSizes, "num_passed", trim_a_block_too_many),
    (KVCache, "trim", trim_without_telling),
    (KVCache, "_within_windows", match_without_windows),
    (cache_module, "name_in", name_groups_alike),
    (SchedulerState, "_tell", same_noise_for_all),
    (SchedulerState, "fork", fork_a_token_late),
    (SchedulerState, "_give_spares", lose_a_spare_slot),
    (Outputs, "_answer", best_is_worst),
    (Scheduler, "expire", lose_deadlines),
    (Scheduler, "cancel", lose_a_cancel),
    (Scheduler, "grant", lose_a_grant),
    (Scheduler, "close_input", close_without_waking),
    (Scheduler, "append", append_to_the_prompt_only),
    (SchedulerState, "_leave", keep_the_slot),
    (SchedulerState, "_tell", leave_the_row_stale),
    (SchedulerState, "evict", evict_without_queueing),
    (WaitingQueue, "add", queue_at_the_front),
    (WaitingQueue, "remove", forget_the_tokens_of_the_queue),
    (Planner, "_write", tell_no_blocks),
    (SequenceGroup, "num_ready", sample_too_early),
    (SequenceGroup, "refresh_hold", never_hold),
    (Planner, "_enrol", spend_no_credit),
    (Outputs, "_finish_of", miss_the_limit),
    (Outputs, "fail", swallow_a_failure),
    (AdmissionControl, "admit", admit_nobody_after_a_preemption),
    (Planner, "_last_resort", no_last_resort),
    (drafts_module, "num_accepted", accept_one_too_many),
    (drafts_module, "num_accepted", accept_whatever_is_right),
    (DraftScheduler, "verify", forget_to_roll_back),
    (SchedulerState, "shrink", name_a_block_that_ends_in_a_wrong_draft),
    (SchedulerState, "shrink", keep_the_blocks_of_wrong_drafts),
    (Planner, "_write", tell_no_parents),
    (Planner, "_write", tell_parents_of_before),
    (DraftScheduler, "take", cut_a_tree_and_not_its_parents),
    (DraftScheduler, "take", draft_on_credit),
    (SchedulerState, "give_back", keep_the_credit_of_what_nobody_got),
    (InFlightSteps, "under_way", forget_what_is_in_flight),
    (InFlightSteps, "begin", take_it_for_the_one_before),
    (AsyncPlanner, "_make_room", write_ahead_without_room),
    (SequenceGroup, "__post_init__", guess_what_the_host_must_know),
    (Planner, "decode_ahead", spend_no_credit_ahead),
    (Outputs, "num_kept", run_past_the_end),
    (drafts_module, "_limit", draft_beyond_the_limit),
    (DraftScheduler, "_grow_ahead", forget_what_was_grown_ahead),
    (DraftScheduler, "_grow", draft_without_room),
    (DraftScheduler, "take", draft_beyond_the_budget),
    (victims, "is_free", take_from_this_step),
    (victims, "behind", spare_nobody),
]


@pytest.mark.parametrize(("owner", "name", "bug"), BUGS, ids=[bug.__name__ for _, _, bug in BUGS])
def test_seeded_bugs_are_caught(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, ServiceError)):
        for seed in SEEDS:
            Simulation(seed).run(EVENTS)


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 20
