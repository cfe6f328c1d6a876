"""An engine process whose runner computes nothing: each step takes FAKE_STEP_S. Everything else is real.

    FAKE_STEP_S=0.001 FAKE_LOG=engine.json python -m benchmarks.fake_engine      (with the environment of an engine)

At its end it writes to FAKE_LOG when it was told each cancel, on the monotonic clock, and how many tokens each request
was given: what a client cannot see.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig
from sluice_server.services.engine import process as engine_process
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.messages import Cancel, Message, Tokens
from sluice_server.services.process.process import Process
from sluice_server.services.process.roles import run_role

FIRST_ID, NUM_IDS = 300, 1000  # ordinary words of the demo model's vocabulary


class FakeStep:
    """A step in flight, which ends after its time."""

    is_done = False

    def __init__(self, plan: StepPlan, end_s: float) -> None:
        self._plan = plan
        self._end_s = end_s

    def collect(self) -> StepResult:
        """Waits for the end, and returns made-up tokens."""
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        plan = self._plan
        tokens = [FIRST_ID + (start + 7 * slot) % NUM_IDS for start, slot in zip(plan.starts, plan.slots, strict=True)]
        return StepResult([token if samples else -1 for token, samples in zip(tokens, plan.samples, strict=True)])


class FakeRunner:
    """A runner whose steps take `step_s`."""

    depth = 0

    def __init__(self, step_s: float) -> None:
        self.progress = 0
        self._step_s = step_s
        self._on_layer: Callable[[], None] = lambda: None

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Does nothing: there are no layers to watch."""
        self._on_layer = on_layer

    def move(self, moves: list[Move]) -> None:
        """Does nothing: there are no blocks."""

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns no transfers."""
        return []

    def place(self, plan: StepPlan) -> None:
        """Does nothing: there is no state of slots."""

    def idle(self) -> bool:
        """Does nothing: there is nothing to prepare."""
        return False

    def launch(self, plan: StepPlan) -> FakeStep:
        """Begins a step."""
        self.progress += 1
        self._on_layer()
        return FakeStep(plan, time.monotonic() + self._step_s)


async def run(process: Process) -> int:
    """Runs the engine's process around the fake runner."""
    config = process.engine_config.sized("cpu")
    num_blocks = config.kv_cache_tokens // config.block_size
    cache = KVCache(num_blocks, config.block_size, config.prefix_caching)
    scheduler = Scheduler(
        cache,
        process.limits,
        process.model.eos_ids,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        settings_of(config),
    )
    engine = Engine(scheduler, FakeRunner(float(os.environ["FAKE_STEP_S"])))
    cancelled: dict[str, float] = {}
    sampled: Counter[str] = Counter()

    def emit(message: Message) -> None:
        if isinstance(message, Tokens):
            sampled[message.envelope.request_id] += len(message.ids)
        elif isinstance(message, Cancel):  # passed on right after its request was let go
            cancelled[message.envelope.request_id] = time.monotonic()
        process.ring.emit(message)

    place = RingMembership(process.ring.process_id, process.ring.epoch, process.ring.leases)
    stage = EngineStage(engine, place, emit, process.record)

    def beat() -> None:
        process.heart.beat(engine.stats.mean_step_s)

    engine.runner.watch(engine_process.at_most_every(engine_process.ATTEND_S, beat))
    try:
        return await process.run(stage)
    finally:
        if "FAKE_LOG" in os.environ:
            Path(os.environ["FAKE_LOG"]).write_text(json.dumps({"cancelled": cancelled, "sampled": sampled}))


@takes_settings
def main(engine: EngineConfig, service: ServiceConfig) -> None:
    """Runs one engine of a ring."""
    engine_process.run = run  # what the role's own body calls: only the runner is another
    raise typer.Exit(run_role(engine, service))


if __name__ == "__main__":
    typer.run(main)
