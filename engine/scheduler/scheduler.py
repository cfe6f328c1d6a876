"""Decide which tokens run next: requests and block counts in, a `Plan` out; sampled tokens in, events out.

One rule, no phases: each step hands out a budget of tokens that lets computed tokens catch up with existing ones.
Sequences one token behind (decode) come first, then longer gaps (prefill, in chunks), then waiting requests while
blocks last. Knows nothing of tensors, sockets or text; the clock is an argument.

Why it always makes progress: never-fits requests are refused in `add`, and the first sequence in key order may take
the blocks of every other one that is not yet part of the step, so it at least advances.
"""

import math

from engine.cache.cache import BlockTable, KVCache
from engine.errors import Code, ServiceError, deadline_exceeded, engine_fault, never_fits, unsupported
from engine.plan import Placement, Plan, StepResult, TokenLogprob
from engine.request import (
    EngineRequest,
    FinishReason,
    Limits,
    check_ids,
    check_params,
    check_priority,
    check_prompt,
    effective_max_tokens,
)
from engine.scheduler.sequence import NO_SLOT, Admission, Sampled, Sequence, State, Times

Failure = tuple[str, ServiceError]


class Scheduler:
    """Owns every open sequence. `plan` and `apply` alternate; `add` and `cancel` come between."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        eos_ids: tuple[int, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.num_preemptions = 0
        self._eos_ids = eos_ids
        self._budget = max_num_batched_tokens
        self._open: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # in key order
        self._running: list[Sequence] = []  # in key order
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_added = 0
        self._step = 0
        self._rows: list[Sequence] = []  # of the plan in flight
        self._next_deadline = math.inf  # no open request expires before it

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ServiceError: bad parameters, a duplicate id, or one that can never fit."""
        if request.request_id in self._open:
            raise ServiceError(Code.INTERNAL, "DUPLICATE_ID", "this request id is already open in the engine")
        check_params(request.params, self.limits)
        if request.params.num_sequences > 1 or request.credit is not None or request.is_open or request.resume_ids:
            raise unsupported("several outputs, credit, open input and resume")
        check_priority(request.priority, self.limits)
        check_ids("prompt", request.prompt_ids, self.limits)
        check_prompt(len(request.prompt_ids), request.params, self.limits)
        max_tokens = effective_max_tokens(len(request.prompt_ids), request.params, self.limits)
        # The last token is sampled but never computed, hence -1.
        needed = self.cache.blocks_for(len(request.prompt_ids) + max_tokens - 1)
        if needed > self.cache.pool.num_blocks:
            raise never_fits(needed, self.cache.pool.num_blocks)
        end_ids = request.params.stop_token_ids + (() if request.params.ignore_eos else self._eos_ids)
        sequence = Sequence(
            request=request,
            order=self._num_added,
            max_tokens=max_tokens,
            barred_ids=tuple(dict.fromkeys(end_ids)),
            end_ids=frozenset(end_ids),
            tokens=list(request.prompt_ids),
            table=BlockTable(root=request.cache_salt),
        )
        self._num_added += 1
        self._open[request.request_id] = sequence
        self._next_deadline = min(self._next_deadline, request.deadline_s)
        _insert(self._waiting, sequence)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free what it holds, now. False if it is not open."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def expire(self, now: float) -> list[Failure]:
        """End every request whose deadline has passed."""
        if now < self._next_deadline:
            return []
        late = [sequence for sequence in self._open.values() if sequence.request.deadline_s <= now]
        failures = [self._fail(sequence, deadline_exceeded()) for sequence in late]
        self._next_deadline = min((s.request.deadline_s for s in self._open.values()), default=math.inf)
        return failures

    def plan(self, now: float) -> Plan | None:
        """What the next step computes; None when there is nothing to do."""
        self._step += 1
        rows: list[tuple[Sequence, int]] = []
        placements: list[Placement] = []
        preempted = self.num_preemptions
        budget = self._budget
        for sequence in self._in_turn():
            if budget == 0:
                break
            if sequence.state is State.RUNNING:  # an earlier one may have preempted it
                budget -= self._schedule(sequence, budget, rows)
        if self.num_preemptions == preempted:
            self._admit(now, budget, rows, placements)
        if not rows:
            return None
        return self._write_plan(rows, placements)

    def apply(self, plan: Plan, result: StepResult, now: float) -> tuple[list[Sampled], list[Failure]]:
        """Advance the rows of `plan`; what was cancelled meanwhile is passed over."""
        events: list[Sampled] = []
        failures: list[Failure] = []
        for i, sequence in enumerate(self._rows):
            if sequence.state is not State.RUNNING or sequence.last_step != plan.step:
                continue
            if i in result.failed:
                self.cache.disown(sequence.table)  # what it computed may be the cause
                failures.append(self._fail(sequence, engine_fault()))
                continue
            sequence.num_computed += plan.query_lens[i]
            self.cache.commit(sequence.table, sequence.tokens, sequence.num_computed)
            if plan.samples[i]:
                events.append(self._advance(sequence, result.token_ids[i], result.logprobs.get(i), now))
        self._rows = []
        return events, failures

    def check(self) -> None:
        """Assert I3 and that queues, slots and states agree; for tests and simulation."""
        self.cache.check([sequence.table for sequence in self._open.values()])
        slots = [sequence.slot for sequence in self._running] + self._free_slots
        assert len(set(slots)) == len(slots), "a slot is used twice"
        assert all(s.state is State.RUNNING and s.slot != NO_SLOT for s in self._running)
        assert all(s.state is State.WAITING and not s.table.blocks for s in self._waiting)
        assert len(self._open) == len(self._running) + len(self._waiting)
        for queue in (self._running, self._waiting):
            assert [s.key for s in queue] == sorted(s.key for s in queue)

    def _in_turn(self) -> list[Sequence]:
        """Running sequences in the order they get tokens: one-token gaps first; the longest unserved first if the
        budget cannot serve them all."""
        short = [sequence for sequence in self._running if sequence.num_missing == 1]
        if len(short) > self._budget:
            short.sort(key=lambda sequence: sequence.last_step)
        return short + [sequence for sequence in self._running if sequence.num_missing > 1]

    def _schedule(self, sequence: Sequence, budget: int, rows: list[tuple[Sequence, int]]) -> int:
        """Add a running sequence to the step; the tokens it took, 0 if it sits this one out."""
        num = min(sequence.num_missing, budget)
        while not self.cache.grow(sequence.table, sequence.num_computed + num):
            victim = self._victim(sequence)
            if victim is None:
                return 0
            self._preempt(victim)
        sequence.last_step = self._step
        rows.append((sequence, num))
        return num

    def _victim(self, beneficiary: Sequence) -> Sequence | None:
        """Who gives way: of those behind the beneficiary and not in this step, the lowest priority, then the least
        computed (least work lost), then the youngest."""
        behind = (s for s in self._running if s.key > beneficiary.key and s.last_step != self._step)
        return min(behind, key=lambda s: (s.request.priority, s.num_computed, -s.order), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything back; its tokens, order and sampling positions stay, so recomputing changes nothing."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self._waiting, sequence)

    def _admit(self, now: float, budget: int, rows: list[tuple[Sequence, int]], placed: list[Placement]) -> None:
        """Give slots to waiting requests, in order, while budget, slots and blocks last."""
        while self._waiting and budget > 0 and self._free_slots:
            sequence = self._waiting[0]
            found = self.cache.match(sequence.table, sequence.tokens)
            # One spare block for each running sequence keeps an admission from causing a preemption at once.
            if not self.cache.can_take(found, len(sequence.tokens), spare=len(self._running)):
                return
            del self._waiting[0]
            self.cache.adopt(sequence.table, found, len(sequence.tokens))
            sequence.num_computed = len(found) * self.cache.block_size
            placed.append(self._place(sequence, now))
            budget -= self._schedule(sequence, budget, rows)

    def _place(self, sequence: Sequence, now: float) -> Placement:
        """Move a waiting sequence into a slot."""
        sequence.state = State.RUNNING
        sequence.slot = self._free_slots.pop()
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
            sequence.first_scheduled_s = now
        _insert(self._running, sequence)
        min_position = sequence.num_prompt + sequence.request.params.min_tokens
        return Placement(sequence.slot, sequence.request.params, sequence.barred_ids, min_position)

    def _write_plan(self, rows: list[tuple[Sequence, int]], placements: list[Placement]) -> Plan:
        rows.sort(key=lambda row: row[1] > 1)  # stable: rows of one token first
        self._rows = [sequence for sequence, _ in rows]
        token_ids: list[int] = []
        new_blocks: list[tuple[int, int, list[int]]] = []
        for sequence, num in rows:
            start = sequence.num_computed
            token_ids.extend(sequence.tokens[start : start + num])
            told = sequence.num_blocks_told
            if told < len(sequence.table.blocks):
                new_blocks.append((sequence.slot, told, sequence.table.blocks[told:]))
                sequence.num_blocks_told = len(sequence.table.blocks)
        return Plan(
            step=self._step,
            slots=[sequence.slot for sequence, _ in rows],
            query_lens=[num for _, num in rows],
            starts=[sequence.num_computed for sequence, _ in rows],
            token_ids=token_ids,
            samples=[sequence.num_missing == num for sequence, num in rows],
            placements=placements,
            new_blocks=new_blocks,
        )

    def _advance(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> Sampled:
        """Append a sampled token; end the sequence if it was its last."""
        first_index = sequence.num_output
        sequence.tokens.append(token)
        admission = None
        if first_index == 0:
            sequence.first_token_s = now
            admission = Admission(sequence.num_prompt, sequence.num_cached, sequence.max_tokens)
        finish = self._finish_of(sequence, token)
        times = None
        if finish is not None:
            times = _times(sequence, now)
            self._end(sequence)
        logprobs = (logprob,) if logprob else ()
        return Sampled(sequence.request.request_id, first_index, (token,), logprobs, admission, finish, times)

    def _finish_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.end_ids:
            stop = token in sequence.request.params.stop_token_ids
            return FinishReason.STOP_TOKEN if stop else FinishReason.EOS
        return FinishReason.LENGTH if sequence.num_output >= sequence.max_tokens else None

    def _fail(self, sequence: Sequence, error: ServiceError) -> Failure:
        self._end(sequence)
        return sequence.request.request_id, error

    def _end(self, sequence: Sequence) -> None:
        """The one way out of the scheduler."""
        del self._open[sequence.request.request_id]
        (self._running if sequence.state is State.RUNNING else self._waiting).remove(sequence)
        self._release(sequence)
        sequence.state = State.ENDED

    def _release(self, sequence: Sequence) -> None:
        """Give back blocks and slot, whatever of them is held."""
        self.cache.release(sequence.table)
        sequence.num_blocks_told = 0
        if sequence.slot != NO_SLOT:
            self._free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert in key order; new arrivals of the common priority go to the end at once."""
    at = len(queue)
    while at > 0 and queue[at - 1].key > sequence.key:
        at -= 1
    queue.insert(at, sequence)


def _times(sequence: Sequence, now: float) -> Times:
    request = sequence.request
    return Times(
        queue_s=sequence.first_scheduled_s - request.arrival_s,
        prefill_s=sequence.first_token_s - sequence.first_scheduled_s,
        decode_s=now - sequence.first_token_s,
        end_s=now,
        num_preemptions=sequence.num_preemptions,
    )
