"""The parts that every process of the ring has: settings, model facts, its connection to the ring, telemetry."""

import asyncio
import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.plugins.entry_points import NO_PLUGINS, Plugins
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource
from sluice_server.services.config import ServiceConfig
from sluice_server.services.memory.watch import MemoryWatch
from sluice_server.services.messages.control import Profile, ProfileKind
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.beats import Beats
from sluice_server.services.process.engine_table import EngineTable, no_engines
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.process.library_pages import give_back_library_pages
from sluice_server.services.process.operations import Operations
from sluice_server.services.process.watched import WatchedFile
from sluice_server.services.profiles.recording import Make, Profiler, StepCount
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.stage import Stage
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.phases import Phase
from sluice_server.services.telemetry.spans import Parent
from sluice_server.services.telemetry.tracing import Tracer

GC_THRESHOLD = 20_000  # allocations minus deallocations between two collections of the youngest generation


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process of the ring, whatever its role.

    Attributes:
        contents: the model files that this process reads, with their state before the first read.
        heart: writes a heartbeat while the loop turns.
        stopping: set by SIGTERM or SIGINT.
        beats: calls what this process does every `BEAT_S`.
        operations: those that gateways ask of this process.
        memory: watches how much memory is left; None where that is off.
        plugins: what the settings allow; only an engine loads them.
        engines: of the ring, as the settings say; read again when their file changes.
        on_engines: called then, with the new table.
        on_beat: called at each heartbeat.
        ending: ends what `beats` calls for this ring, once that has begun.
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
    beats: Beats
    operations: Operations
    memory: MemoryWatch | None = None
    plugins: Plugins = NO_PLUGINS
    engines: WatchedFile[EngineTable] = dataclasses.field(default_factory=no_engines)
    on_engines: list[Callable[[EngineTable], None]] = dataclasses.field(default_factory=list)
    on_beat: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    ending: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def record(self, envelope: Envelope, phase: Phase) -> None:
        """Record a span for a phase of a request."""
        self.tracer.record(envelope.request_id, Parent(envelope.traceparent, envelope.tracestate), phase)

    def serve_profiles(self, more: Mapping[ProfileKind, Make] | None = None, steps: StepCount | None = None) -> None:
        """Records profiles on request; `more` and `steps`: see `Profiler`."""
        self.operations.serve(Profile, Profiler(self.ring.process_id, self.metrics, more, steps).take)

    def start(self, stage: Stage) -> None:
        """Start to run `stage` in the ring. Raises ServiceError MODEL_CHANGED if files were replaced while they were
        read.

        Freezes the objects that exist now and makes garbage collection rare: requests leave few cycles behind, and
        collecting took a tenth of a gateway's time. Gives back what only its start used: pages of libraries, and
        freed memory, which is 1.5 MB of a process that has read a tokenizer.
        """
        self.contents.check()
        if gc.get_threshold()[0] != GC_THRESHOLD:  # a gateway starts one stage for each model
            call_aside(_give_back)
            gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 50, 100)
        self.ring.handlers.on_operation = self.operations.handle
        self.ring.start(stage)
        if self.memory is not None and self.memory.begin():
            self.metrics.collect_from(self.memory.figures)
        self.ending.append(self.beats.add(functools.partial(self._beat, stage)))

    def _beat(self, stage: Stage, elapsed_s: float) -> None:
        """Write a heartbeat, repair the inbox, and drop what gateways that are gone have left."""
        self.heart.beat()
        self.ring.mend()
        self.heart.note(self.ring.mismatch, self.config.inbox)
        self.ring.leases.pass_time(elapsed_s)
        stage.reap()
        self.ring.reap()
        self.operations.reap()
        if self.engines.refresh():
            for told in self.on_engines:
                told(self.engines.value)
        for call in self.on_beat:
            call()

    async def leave(self) -> None:
        """Leaves the ring; the process may stay in others."""
        if self.ending:
            self.ending.pop()()
        self.heart.note("", self.config.inbox)
        await self.operations.close()
        self.ring.stop()

    async def run(self, stage: Stage) -> int:
        """Run `stage` in the ring until the process is asked to stop. Returns the exit status."""
        self.start(stage)
        await self.stopping.wait()
        return 0


def _give_back() -> None:
    give_back_library_pages()
    give_back()
