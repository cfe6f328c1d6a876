"""Drives the engine's own scheduler and cache through random histories against a model that is a hash.

    python -m tests.engine.scheduler.simulate --seed 1 --events 100000

A token is H(prompt, seed, position), so any other token is a leak or a loss. Checked: one terminal for each request,
contiguous indices, the right tokens despite chunks, prefix hits and preemption, no idle step with work, and that
blocks add up. Prints the SHA-256 of the trace: equal seeds give equal traces.
"""

import argparse
import hashlib
import random

from engine.cache.cache import KVCache
from engine.plan import Plan, StepResult
from engine.request import EngineRequest, Limits, SamplingParams
from engine.scheduler.scheduler import Scheduler

VOCAB = 50
LIMITS = Limits(context_length=96, vocab_size=VOCAB)
EOS = (7,)


def token_at(prompt: tuple[int, ...], seed: int, position: int) -> int:
    """The fake model's token."""
    return hashlib.sha256(f"{prompt}{seed}{position}".encode()).digest()[0] % VOCAB


class Simulation:
    """One seed's history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.cache = KVCache(rng.choice((24, 30, 60)), 4, prefix_caching=rng.random() < 0.8)
        self.scheduler = Scheduler(self.cache, LIMITS, EOS, rng.choice((2, 5, 12)), rng.choice((3, 7, 40)))
        self.trace = hashlib.sha256()
        self.now = 0.0
        self.num_events = 0
        self.open: dict[str, EngineRequest] = {}
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.slots: dict[int, str] = {}

    def run(self, num_events: int) -> str:
        """Play, then drain; the trace's hash."""
        while self.num_events < num_events:
            self.event()
            if self.num_events % 50 == 0:
                self.scheduler.check()
        while self.open:
            self.step()
        self.scheduler.check()
        assert self.cache.pool.num_held == 0, "blocks are held after the drain"
        return self.trace.hexdigest()

    def event(self) -> None:
        """One random thing."""
        self.num_events += 1
        choice = self.rng.random()
        if choice < 0.25 and len(self.open) < 20:
            self.submit()
        elif choice < 0.30 and self.open:
            request_id = self.rng.choice(sorted(self.open))
            assert self.scheduler.cancel(request_id)
            self.end(request_id, "cancelled")
        else:
            self.step()

    def submit(self) -> None:
        """A request, often with a prefix that others have too."""
        rng = self.rng
        prefix = [rng.choice((1, 2)) for _ in range(rng.choice((0, 4, 9, 16)))]
        prompt = tuple(prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))])
        params = SamplingParams(
            max_tokens=rng.randrange(1, 40), seed=rng.randrange(3), ignore_eos=rng.random() < 0.5, min_tokens=0
        )
        deadline = self.now + rng.randrange(1, 60) if rng.random() < 0.1 else float("inf")
        request = EngineRequest(
            f"{len(self.output):032x}",
            prompt,
            params,
            rng.choice((0, 0, 5)),
            self.now,
            deadline,
            rng.choice((b"a", b"b")),
        )
        self.scheduler.add(request)
        self.open[request.request_id] = request
        self.output[request.request_id] = []

    def step(self) -> None:
        """One step of the fake model; now and then a row fails."""
        self.now += 1
        for request_id, _ in self.scheduler.expire(self.now):
            assert self.open[request_id].deadline_s <= self.now
            self.end(request_id, "deadline")
        assert all(request.deadline_s > self.now for request in self.open.values()), "a deadline was lost"
        plan = self.scheduler.plan(self.now)
        if plan is None:
            assert not self.open, "an idle step with work"
            return
        assert plan.num_tokens == sum(plan.query_lens)
        failed = frozenset(i for i in range(len(plan.slots)) if self.rng.random() < 0.002)
        events, failures = self.scheduler.apply(plan, self.compute(plan, failed), self.now)
        for request_id, _ in failures:
            self.end(request_id, "failed")
        for event in events:
            out = self.output[event.request_id]
            assert event.first_index == len(out), "a gap or a repetition"
            out.extend(event.token_ids)
            request = self.open[event.request_id]
            want = token_at(request.prompt_ids, request.params.seed, len(request.prompt_ids) + len(out) - 1)
            assert out[-1] == want, "another request's token"
            self.trace.update(f"{event.request_id}{event.first_index}{event.token_ids}{event.finish}".encode())
            if event.finish is not None:
                self.end(event.request_id, "finished")

    def compute(self, plan: Plan, failed: frozenset[int]) -> StepResult:
        """Tokens of the rows that sample, from what the plan itself says of their sequences."""
        running = {sequence.slot: sequence for sequence in self.scheduler._running}
        ids, at = [], 0
        for i, slot in enumerate(plan.slots):
            sequence, num = running[slot], plan.query_lens[i]
            start = plan.starts[i]
            assert plan.token_ids[at : at + num] == sequence.tokens[start : start + num]
            assert len(sequence.table.blocks) * 4 >= start + num, "computes into a block it does not have"
            at += num
            request = sequence.request
            ids.append(token_at(request.prompt_ids, request.params.seed, start + num) if plan.samples[i] else -1)
        return StepResult(ids, failed)

    def end(self, request_id: str, how: str) -> None:
        """Exactly one terminal."""
        assert request_id not in self.ended, "a second terminal"
        self.ended[request_id] = how
        del self.open[request_id]
        self.trace.update(f"{request_id}{how}".encode())


def main() -> None:
    """Replay one seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=100_000)
    options = parser.parse_args()
    print(Simulation(options.seed).run(options.events))


if __name__ == "__main__":
    main()
