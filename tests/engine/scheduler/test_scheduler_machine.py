"""The simulator's rules as a hypothesis state machine, which shrinks a failure to a few rules."""

import random

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.scheduler.simulate import Simulation


class SchedulerMachine(RuleBasedStateMachine):
    """A state machine over one scheduler; the full check runs after every rule."""

    @initialize(seed=st.integers(0, 1000), rng=st.randoms(use_true_random=False))
    def begin(self, seed: int, rng: random.Random) -> None:
        self.simulation = Simulation(seed)
        self.simulation.rng = rng  # so that hypothesis can shrink what is drawn

    @precondition(lambda self: len(self.simulation.ledger.open) < 12)
    @rule()
    def submit(self) -> None:
        self.simulation.submit()

    @rule(num=st.integers(1, 6))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.simulation.step()

    @rule()
    def preempt(self) -> None:
        self.simulation.preempt()

    @rule(quality=st.sampled_from((0.0, 0.5, 1.0)))
    def draft(self, quality: float) -> None:
        """Sets the share of wrong drafts: all, half or none."""
        self.simulation.proposer.quality = quality

    @precondition(lambda self: self.simulation.ledger.open)
    @rule(which=st.integers(0, 11))
    def disturb(self, which: int) -> None:
        """Cancels, cancels one output, grants, appends, closes or updates."""
        ids = list(self.simulation.ledger.open)
        request_id = ids[which % len(ids)]
        self.simulation.disturb(request_id, self.simulation.ledger.open[request_id])

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check_cheaply()
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis.settings(max_examples=100, stateful_step_count=40, deadline=None)
