"""Drives the engine's own scheduler and cache through random histories against a model that is a hash.

    python -m tests.engine.scheduler.simulate --seed 1 --events 100000 [--seeds 10 --jobs 2]

Events: submit, step with drafts right and wrong, cancel of a request or of one output, a preemption out of the blue, a
cache that grows, shrinks or is cleared of a tenant, grant, append, close, update, a failing row, a full queue; requests
of every kind (several outputs, searches, credit, open input, resumed ones, pooled ones); in pools so small that
preemption is the rule; with up to two steps in flight while the next is planned, decodes ahead of their tokens or, of
stages, other sequences; in a quarter of the seeds for adapters that outnumber their slots. After each event the cheap
invariants are checked (I1 to I7 of the reliability notes as far as a scheduler can break them), the full ones every
thousand. Equal seeds give equal traces (I9): the SHA-256 of the trace is printed last.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import random
from collections import deque

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.behind import WriteBehind
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.clearing import clear, wipe
from sluice_server.engine.kv_cache.prefix import owner_of
from sluice_server.engine.kv_cache.resizing import num_outside
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.request import Limits
from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.costs import PreemptionCosts
from sluice_server.engine.scheduler.policies import POLICIES
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.sequence import Sequence, SequenceStatus
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.shortage import MOST_WAITS
from tests.engine.kv_cache.replica import Replica
from tests.engine.scheduler.fake_adapters import FakeAdapters, is_loss
from tests.engine.scheduler.fake_model import VOCAB, FakeProposer, FakeRunner, extend
from tests.engine.scheduler.ledger import EOS, Ledger, Open
from tests.engine.scheduler.random_requests import RandomRequests

LIMITS = Limits(context_length=96, vocab_size=VOCAB)
SIZE = 4
FULL_CHECK_EVENTS = 1000
MOST_IDLE = 4  # steps in a row without a row, in which an adapter's slot changes hands
STAGES = (1, 1, 1, 2, 1, 1, 3)  # by seed
PATIENCE_STEPS = 3000  # in which a request without deadline must have moved: no request starves


class Simulation:
    """The history of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks, num_slots = rng.choice((24, 32, 60)), rng.choice((2, 5, 12))
        self.num_slots, self.budget = num_slots, rng.choice((3, 7, 40))
        num_host, num_disk = rng.choice(((0, 0), (6, 0), (6, 40)))
        window = Window(rng.choice((5, 9, 30)), self.budget) if rng.random() < 0.25 else None
        tiers = Tiers(num_host, num_disk) if num_host else None
        windows = (window,) if window is None or tiers else (*rng.choice(((), (None,), (None, None))), window, window)
        num_blocks = len(windows) * (rng.choice((10, num_blocks)) if window else num_blocks)
        self.max_blocks = num_blocks * 3 // 2 if seed % 4 == 1 else num_blocks  # of other seeds it only shrinks
        self.resizes = seed % 2 == 1
        self.clears = seed % 5 == 3
        self.cache = KVCache(num_blocks, SIZE, rng.random() < 0.8, tiers, windows, self.max_blocks)
        self.log = self.cache.start_log()
        self.replica = Replica()
        self.settings = SchedulerSettings(
            costs=PreemptionCosts(1, 10.0, rng.choice((1.0, 10.0, 100.0))) if tiers else None,
            policy=rng.choice(sorted(POLICIES)),
            max_queued_requests=rng.choice((8, 1000)),
            watermark=rng.choice((0.01, -3.0)),  # the second admits far more than will fit: preemption is the rule
            max_preemptions=rng.choice((0, 2)),  # none: a sequence without blocks waits, up to the last resort
            max_overtakes=rng.choice((0, 3, 64)),
            max_long_prefills=rng.choice((1, 4)),
            max_pooling_tokens=(0, 1, 5)[seed // 4 % 3],
            pause_hold_s=rng.choice((0.0, 5.0, 50.0)),
            tenant_weights={"a": 3.0},
            max_draft_tokens=rng.choice((0, 1, 3, 9)),
            max_draft_width=(1, 1, 2, 4)[seed % 4],  # of half the seeds the histories are of chains alone
            adapts_drafts=rng.random() < 0.3,
            num_stages=STAGES[seed % len(STAGES)],
        )
        self.adapters = FakeAdapters(random.Random(f"adapters {seed}"), seed % 4 == 2)
        books = self.adapters.requests
        limits = dataclasses.replace(LIMITS, max_adapters=self.adapters.num_slots)
        self.scheduler = Scheduler(self.cache, limits, (EOS,), num_slots, self.budget, self.settings, books)
        self.runner = FakeRunner(num_slots, self.max_blocks, SIZE, num_host, rng, len(windows))
        self.proposer = FakeProposer(rng, rng.choice((0.3, 0.8, 1.0)))
        self.ledger = Ledger(SIZE)
        self.losses = victims.Losses(self.scheduler._state, self.scheduler._lengths)
        self.waited: dict[tuple[Sequence, int], int] = {}  # steps without a block there
        # Steps in flight while the next one is planned:
        self.depth = seed % 3 if self.settings.num_stages == 1 else self.settings.num_stages - 1
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.num_ahead = self.num_beside = 0  # steps that were planned so, one token ahead or of stages
        self.num_idle = 0  # steps in a row that computed nothing, while an adapter's slot changes hands
        self.num_trees = 0  # of drafts that were verified
        self.num_resizes = self.num_evacuated = self.num_cleared = 0
        self.behind = WriteBehind(self.cache)
        self.now = 0.0
        self.num_events = 0
        self.requests = RandomRequests(rng)

    def run(self, num_events: int) -> str:
        """Runs the events, drains, and returns the trace's hash."""
        while self.num_events < num_events:
            self.event()
            if self.num_events % FULL_CHECK_EVENTS == 0:
                self.check()
        self.drain()
        return self.ledger.trace.hexdigest()

    def event(self) -> None:
        """Runs one random event and the cheap checks."""
        self.num_events += 1
        choice = self.rng.random()
        if choice < 0.80:
            self.step()
        elif choice < 0.92:
            if len(self.ledger.open) < 20:
                self.submit()
        elif choice < 0.93:
            self.preempt()
        elif choice < 0.935 and self.resizes:
            self.resize()
        elif 0.935 <= choice < 0.94 and self.clears:
            self.clear()
        elif self.ledger.open:
            request_id = self.rng.choice(list(self.ledger.open))
            self.disturb(request_id, self.ledger.open[request_id])
        self.check_cheaply()

    def drain(self) -> None:
        """Runs until every request has received its tokens and has ended."""
        for request_id, one in self.ledger.open.items():
            if one.is_ending:
                continue
            if one.is_open:
                self.scheduler.close_input(request_id, self.now)
                one.is_open = False
            if one.credit is not None:
                self.scheduler.grant(request_id, 1000, self.now)
                one.credit += 1000
        self.adapters.release()
        for _ in range(PATIENCE_STEPS):
            if not self.ledger.open and not self.scheduler.has_work:  # an update may be followed by a cancel
                break
            self.step()
        self.land(0)
        assert not self.ledger.open, "a request never ends"
        self.check()
        assert self.cache.pool.num_held == 0, "blocks are held after the drain"
        assert not self.scheduler.has_work

    def preempt(self) -> None:
        """Preempts a random sequence, as after a device ran out of memory. It does not count towards the bound on
        preemptions."""
        running = self.scheduler._state.running
        if running:
            sequence = self.rng.choice(running)
            self.scheduler._state.evict(sequence)
            for one in sequence.group.sequences:
                one.num_preemptions = 0

    def resize(self) -> None:
        """Sets the cache's limit, with no step in flight; one that an open request needs more than is refused."""
        self.land(0)
        num_blocks = self.rng.randrange(1, self.max_blocks + 1)
        try:
            self.scheduler.resizer.set_limit(num_blocks)
        except ServiceError as error:
            assert error.reason == "CACHE_IN_USE"
            return
        self.num_resizes += 1
        for move in self.cache.tiers.resize(self.rng.randrange(7)) if self.cache.tiers is not None else ():
            self.cache.push(move)
        assert self.cache.pool.num_blocks == num_blocks

    def clear(self) -> None:
        """Clears what is a tenant's, or all, and wipes some of it, or all that is free."""
        tenant = self.rng.choice(("a", "b", None))
        clear(self.cache, b"" if tenant is None else owner_of(tenant), self.scheduler.tables_of(tenant))
        self.num_cleared += 1
        if self.rng.random() < 0.5:
            while wipe(self.cache, 3):
                pass
        self.runner.move(self.cache.take_moves())

    def evacuate(self) -> None:
        """Goes on with making room above the limit, and loses the contents of what is offline."""
        held = num_outside(self.cache)
        if not held:
            return
        if self.rng.random() < 0.5:  # another size before this one is reached
            self.resize()
            return
        running = list(self.scheduler._state.running)
        left = self.scheduler.resizer.advance(self.rng.choice((1, 3, 100)))
        for one in running:  # a preemption for it does not count towards the bound
            one.num_preemptions = one.num_preemptions if one.state is SequenceStatus.RUNNING else 0
        self.num_evacuated += held - left
        self.runner.move(self.cache.take_moves())
        assert left < held, "no room is made"
        self.runner.lose([block for block in range(self.max_blocks) if self.cache.pool.is_offline(block)])

    def submit(self) -> None:
        """Submits a request, often with a prefix of earlier ones."""
        request = self.requests.make(self.now, self.adapters.choose())
        try:
            self.scheduler.add(request)
        except ServiceError as error:
            assert error.code in (Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION), error
            self.ledger.trace.update(error.reason.encode())
            return
        self.ledger.accept(request)

    def disturb(self, request_id: str, one: Open) -> None:
        """Changes a random open request."""
        rng, scheduler = self.rng, self.scheduler
        kind = rng.randrange(6)
        if kind == 0:
            assert scheduler.cancel(request_id)
            assert not scheduler.cancel(request_id)
            self.ledger.end(request_id, "cancelled")
        elif one.is_ending:
            assert not scheduler.cancel_output(request_id, 0, self.now)
        elif kind == 1 and not (one.request.params.is_search or one.request.pooling):
            scheduler.cancel_output(request_id, rng.randrange(one.request.params.n), self.now)
            one.is_ending = request_id not in scheduler._state.groups
        elif kind == 2 and one.credit is not None:
            num = rng.randrange(10)
            scheduler.grant(request_id, num, self.now)
            one.credit += num
        elif kind in (3, 4) and one.is_open:
            self.append_or_close(request_id, one)
        elif kind == 5:
            self.update(request_id, one)

    def append_or_close(self, request_id: str, one: Open) -> None:
        """Appends to the prompt of a request, or closes it."""
        rng = self.rng
        if rng.random() < 0.5:
            self.scheduler.close_input(request_id, self.now)
            one.is_open = False
            return
        ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        try:
            self.scheduler.append(request_id, ids, self.now)
        except ServiceError as error:
            assert error.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION), error
            return
        self.ledger.append(request_id, ids)

    def update(self, request_id: str, one: Open) -> None:
        """Changes the limit, priority or deadline."""
        rng = self.rng
        max_tokens = rng.choice((None, rng.randrange(1, one.max_tokens + 1)))
        if one.request.params.is_search or one.request.pooling:
            max_tokens = None
        deadline = rng.choice((None, self.now + rng.randrange(1, 200)))
        self.scheduler.update(request_id, max_tokens, rng.choice((None, 0, 5)), deadline)
        one.max_tokens = one.max_tokens if max_tokens is None else max_tokens
        one.deadline_s = one.deadline_s if deadline is None else deadline

    def step(self) -> None:
        """Runs one step of the fake model; sometimes a row fails."""
        self.now += 1
        self.adapters.settle()
        events, failures = self.scheduler.expire(self.now)
        for event in events:
            self.ledger.take(event, self.now)
        for request_id, error in failures:
            assert is_loss(error) or self.ledger.open[request_id].deadline_s <= self.now
            self.ledger.end(request_id, "failed" if is_loss(error) else "deadline")
        for move, is_good in self.runner.moved():
            self.cache.moved(move, is_good)
        plan = self.plan()
        self.adapters.carry_out()
        self.runner.move(self.cache.take_moves())
        if plan is None or self.rng.random() < 0.1:  # an engine does it only while it is idle
            self.runner.move(self.behind.moves())
        if plan is None:
            self.check_idle()
            return
        self.num_idle = 0
        self.check_preemptions(plan)
        self.check_waits(plan)
        self.check_writes(plan)
        self.launch(plan)
        self.land(self.depth)

    def plan(self) -> StepPlan | None:
        """Returns the next step, once those in flight that it depends on are applied."""
        while self.in_flight:
            if self.scheduler.takes_drafts_ahead:
                self.draft()
            plan = self.scheduler.plan_ahead(self.now)
            if plan is not None:
                self.num_ahead += self.settings.num_stages == 1
                self.num_beside += self.settings.num_stages > 1
                return plan
            self.runner.move(self.cache.take_moves())
            self.land(len(self.in_flight) - 1)
        self.evacuate()
        self.draft()
        return self.scheduler.plan(self.now)

    def draft(self) -> None:
        """Offers drafts to some sequences, often to none."""
        if self.scheduler.rests():
            return
        asks = self.scheduler.asks(grow=self.rng.random() < 0.5)
        if self.rng.random() < 0.9:
            self.scheduler.offer(asks, [self.proposer.propose(ask) for ask in asks], 0.1 * len(asks))

    def launch(self, plan: StepPlan) -> None:
        """Computes a plan without applying its result."""
        assert plan.num_tokens == sum(plan.query_lens) <= max(self.budget, len(plan.slots)), "over budget"
        failed = frozenset(i for i in range(len(plan.slots)) if self.rng.random() < 0.002)
        self.num_trees += len(plan.parents)
        self.adapters.launch(plan, {one.slot: one.group.request for one in self.scheduler._state.running})
        self.runner.place(plan)
        self.in_flight.append((plan, self.runner.compute(plan, failed)))

    def land(self, most: int) -> None:
        """Applies the oldest results until at most `most` are in flight."""
        self.scheduler.take_preempted()
        while len(self.in_flight) > most:
            plan, result = self.in_flight.popleft()
            events, failures = self.scheduler.apply(plan, result, self.now + 0.01 * plan.num_tokens)
            for event in events:
                self.ledger.take(event, self.now)
            for pooled in self.scheduler.take_pooled():
                self.ledger.pool(pooled)
            for request_id, _ in failures:
                self.ledger.end(request_id, "failed")

    def check_writes(self, plan: StepPlan) -> None:
        """Checks I3: no row writes into a named block, which other sequences may read at any time."""
        named = {one.slot: one.table.num_named for one in self.scheduler._state.running}
        for slot, start in zip(plan.slots, plan.starts, strict=True):
            assert start // SIZE >= named[slot], "writes into a block that was named"

    def check_preemptions(self, plan: StepPlan) -> None:
        """Checks I6: no sequence is preempted more often than the bound plus one while another row could go on."""
        spared = [one for one in self.scheduler._state.waiting if one.num_preemptions > self.settings.max_preemptions]
        for one in spared:
            one.num_preemptions = self.settings.max_preemptions
        assert not spared or len(plan.slots) == 1, "preempted more often than is allowed while others run"

    def check_waits(self, plan: StepPlan) -> None:
        """Checks that no decode with budget left lacks a block that it could take from a lower priority, or lacks it
        for longer than is allowed although there is a victim."""
        if self.in_flight or plan.num_tokens >= self.budget or self.settings.num_stages > 1:
            return
        waited, self.waited = self.waited, {}
        running, step = self.scheduler._state.running, plan.step
        for one in running:
            if one.last_step == step or one.num_missing != 1 or one.group.holds_back:
                continue
            if one.num_computed < one.capacity or self.cache.num_free >= self.cache.num_groups:
                continue  # it lacks no block: it waits for its turn, or for another output's prompt
            found = victims.behind(running, one, step, self.settings.max_preemptions, self.losses.of)
            assert found is None or found.group.priority >= one.group.priority, "waits for a lower priority"
            if found is not None:
                self.waited[one, one.num_computed] = waited.get((one, one.num_computed), 0) + 1
                assert self.waited[one, one.num_computed] <= MOST_WAITS, "waits too long for a block"

    def check_idle(self) -> None:
        """Checks I6: no step is idle with work left, unless a disk is waited for."""
        if self.runner.is_moving or self.adapters.is_busy:
            return
        self.num_idle += self.scheduler.has_work
        if self.scheduler.has_work and self.adapters.are_awaited and self.num_idle < MOST_IDLE:
            return
        assert not self.scheduler.has_work, "an idle step with work"
        for request_id, one in self.ledger.open.items():
            assert one.is_open or one.credit == 0, f"{request_id} waits for nothing"

    def check_cheaply(self) -> None:
        """Checks counts, in time that does not grow with history."""
        pool, running = self.cache.pool, self.scheduler._state.running
        held = {block for one in running for own in one.table.groups for block in own} - {pool.null}
        assert pool.num_held == len(held), "blocks are held without an owner, or twice"
        assert len(running) <= self.num_slots
        self.adapters.requests.check(
            (one.request for one in self.scheduler._state.groups.values()), (one.group.request for one in running)
        )
        under_way = self.scheduler._in_flight.under_way()
        for one in running:
            num = one.num_computed + under_way.get(one, (0, 0))[0]
            is_drafted = bool(one.drafting and one.drafting.ids)  # there may be room for more drafts than came
            is_exact = len(one.table.blocks) == self.cache.sizes.blocks_for(num)
            assert is_exact or is_drafted, "blocks hold nothing of use"
            assert one in under_way or not is_drafted, "drafts outlive their step"
        self.ledger.check()
        assert all(one.deadline_s > self.now for one in self.ledger.open.values()), "a deadline was lost"

    def check(self) -> None:
        """Checks I3 in full, that every cell holds the chain of its sequence's tokens (I4), and that the log adds up to
        the prefix index."""
        self.scheduler.check()
        self.replica.follow(self.log.take())
        assert self.replica.names == self.log.names, "the log differs from the index"
        open_here = {request_id for request_id, one in self.ledger.open.items() if not one.is_ending}
        assert set(self.scheduler._state.groups) == open_here, "the books differ"
        for one in self.scheduler._state.running:
            if one.num_blocks_planned == len(one.table.blocks) and not one.freed:
                self.check_cells(one)
        assert all(one.state is SequenceStatus.RUNNING for one in self.scheduler._state.running)

    def check_cells(self, one: Sequence) -> None:
        """Checks that the sequence's cells hold the chains of its tokens, except for freed blocks."""
        for group, trimmed in enumerate(one.table.trimmed):
            first, chain = trimmed * SIZE, 0
            cells = self.runner.chains(one.slot, first, one.num_computed, group)
            for position, token in enumerate(one.tokens[: one.num_computed]):
                chain = extend(chain, token)
                assert position < first or cells[position - first] == chain, "a stale cell"


def play(seed: int, events: int) -> str:
    """The trace hash of one seed."""
    return run(Simulation(seed), seed, events)


def run(simulation: Simulation, seed: int, events: int) -> str:
    """The trace hash of a new simulation. A failure names the seed that replays it."""
    try:
        return simulation.run(events)
    except Exception as error:
        raise AssertionError(f"replay with: make simulate SEED={seed} EVENTS={events}") from error


def main() -> None:
    """Replay seeds, the events shared among them. The last line is the SHA-256 of the trace (of all traces, in order
    of the seeds, where there are several)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    seeds, each = range(options.seed, options.seed + options.seeds), options.events // options.seeds
    if options.seeds == 1:
        print(play(options.seed, each))
        return
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        traces = list(pool.map(play, seeds, [each] * len(seeds)))
    print(f"{options.seeds} seeds of {each} events")
    print(hashlib.sha256("".join(traces).encode()).hexdigest())


if __name__ == "__main__":
    main()
