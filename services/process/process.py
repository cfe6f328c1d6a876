"""What every process of the ring has, whatever its role: settings, model facts, its place in the ring, telemetry."""

import asyncio
import dataclasses
import gc
import time

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.request import Limits
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.messages import Envelope, Role
from sluice_server.services.process.heartbeat import BEAT_S, Heartbeat
from sluice_server.services.ring.loop import RingLoop, Stage
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.spans import Parent
from sluice_server.services.telemetry.tracing import Tracer

GC_THRESHOLD = 20_000  # objects made and not yet gone between two collections of the youngest


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """Attributes:
    contents: the model's files that this process reads, as they were before it read them.
    heart: beats while the loop turns.
    stopping: SIGTERM or SIGINT came.
    """

    engine_config: EngineConfig
    config: ServiceConfig
    role: Role
    source: ModelSource
    contents: CheckpointFiles
    model: ModelConfig
    limits: Limits
    ring: RingLoop
    tracer: Tracer
    metrics: Metrics
    heart: Heartbeat
    stopping: asyncio.Event

    def record(self, envelope: Envelope, phase: Phase) -> None:
        """Make a span of a phase of a request."""
        self.tracer.record(envelope.request_id, Parent(envelope.traceparent, envelope.tracestate), phase)

    def start(self, stage: Stage) -> None:
        """Begin to turn `stage` in the ring, if all that was read is of one revision: raises ServiceError MODEL_CHANGED
        where files were replaced meanwhile. What exists now stays, and requests leave few cycles behind: the collector
        need not look at the former, and at the latter seldom (it took a tenth of a gateway's time)."""
        self.contents.check()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 50, 100)
        self.ring.start(stage)
        self._beat(stage, time.monotonic())

    def _beat(self, stage: Stage, last_s: float) -> None:
        """Say that the loop turns, and let go of what gateways that are gone have left behind."""
        now_s = time.monotonic()
        self.heart.beat()
        self.ring.mend()
        self.heart.note(self.ring.mismatch)
        self.ring.leases.pass_time(min(now_s - last_s, 2 * BEAT_S))  # our own pause is nobody's fault
        stage.reap()
        self.ring.reap()
        asyncio.get_running_loop().call_later(BEAT_S, self._beat, stage, now_s)

    async def run(self, stage: Stage) -> int:
        """Turn `stage` in the ring until the process is told to stop; the exit status."""
        self.start(stage)
        await self.stopping.wait()
        return 0
